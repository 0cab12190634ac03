use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use super::*;

fn nice(thread: Pid) -> i32 {
    getpriority_process(Some(thread)).unwrap()
}

fn cpus(thread: Pid) -> String {
    Cpus::of(&sched_getaffinity(Some(thread)).unwrap()).to_string()
}

/// Calls `meanwhile` with a data thread's ID while that thread runs.
fn with_member(threads: &Arc<DataThreads>, meanwhile: impl FnOnce(Pid)) {
    let ((tell, told), (end, over)) = (channel(), channel::<()>());
    thread::scope(|scope| {
        scope.spawn(move || {
            let _member = threads.join();
            tell.send(gettid()).unwrap();
            let _ = over.recv();
        });
        meanwhile(told.recv().unwrap());
        drop(end);
    });
}

fn params(priority: Priority, cpus: Option<&str>) -> SchedParams {
    let cpus = cpus.map(|list| list.parse().unwrap());
    SchedParams { priority, cpus, cpu_floor: None }
}

#[test]
fn a_thread_gets_the_terms_when_it_joins_and_when_they_change() {
    let all = cpus(gettid());
    let own = sched_getaffinity(None).unwrap();
    let first = (0..CpuSet::MAX_CPU).find(|cpu| own.is_set(*cpu)).unwrap().to_string();
    let before = nice(gettid());
    let threads = DataThreads::new(params(Priority::Low, Some(&first)), |_| {});
    with_member(&threads, |thread| {
        assert_eq!(nice(thread), Priority::Low.nice(before));
        assert_eq!(cpus(thread), first);
        threads.set(&params(Priority::Low, None));
        assert_eq!((nice(thread), cpus(thread)), (Priority::Low.nice(before), all));
    });
    // A thread that has not joined is unchanged, and one that has left is forgotten.
    assert_eq!(nice(gettid()), before);
    assert!(threads.state.lock().members.is_empty());
    assert_eq!(threads.refused(), Vec::<String>::new());
}

/// As the kernel numbers them.
const OTHER: &str = "0";
const IDLE: &str = "5";

/// The scheduling policy of a thread.
fn policy(thread: Pid) -> String {
    let path = format!("/proc/self/task/{}/stat", thread.as_raw_nonzero());
    let stat = std::fs::read_to_string(path).unwrap();
    // After the name, field 3 comes first.
    let fields = stat.rsplit_once(") ").unwrap().1;
    fields.split(' ').nth(41 - 3).unwrap().to_owned()
}

/// Whether the system lets threads return from idle CPUs.
fn may_return() -> bool {
    thread::spawn(|| class::try_on_this_thread().is_ok()).join().unwrap()
}

fn with_floor(priority: Priority) -> SchedParams {
    SchedParams { cpu_floor: Some(CpuFloor::try_from(20_u8).unwrap()), ..params(priority, None) }
}

#[test]
fn threads_return_from_idle_cpus_when_a_vm_stops() {
    // Without low priority no other thread changes their class.
    let threads = DataThreads::new(with_floor(Priority::Normal), |_| {});
    let back = if may_return() { OTHER } else { IDLE };
    with_member(&threads, |thread| {
        assert_eq!(policy(thread), OTHER);
        threads.state.lock().turn(Class::Idle);
        assert_eq!(policy(thread), IDLE);
        threads.hurry();
        assert_eq!(policy(thread), back);
        threads.state.lock().turn(Class::Idle);
        threads.set(&params(Priority::Normal, None));
        assert_eq!(policy(thread), back);
    });
    assert!(threads.keeper.get().is_none());
}

#[test]
fn threads_run_on_idle_cpus_only_where_they_may_return() {
    let threads = DataThreads::new(with_floor(Priority::Low), |_| {});
    with_member(&threads, |thread| {
        let is_restricted = loop {
            if policy(thread) == IDLE {
                break true;
            }
            if !threads.refused().is_empty() {
                break false;
            }
            thread::sleep(Duration::from_millis(10));
        };
        assert_eq!(is_restricted, may_return());
        threads.set(&with_floor(Priority::Normal));
        assert_eq!(policy(thread), OTHER);
    });
}

#[test]
fn only_low_priority_yields_and_only_below_all() {
    let floor = |params| DataThreads::new(params, |_| {}).state.lock().floor();
    assert_eq!(floor(with_floor(Priority::Low)), Some(CpuFloor::try_from(20_u8).unwrap()));
    assert_eq!(floor(with_floor(Priority::High)), None);
    assert_eq!(floor(SchedParams::default()), None);
    let all = SchedParams { cpu_floor: Some(CpuFloor::ALL), ..SchedParams::default() };
    assert_eq!(floor(all), None);
}

#[test]
fn older_agents_understand_terms_without_a_floor() {
    let json = serde_json::to_string(&SchedParams::default()).unwrap();
    assert!(!json.contains("cpu_floor"), "{json}");
    let with: SchedParams = serde_json::from_str(r#"{"priority":"low","cpu_floor":20}"#).unwrap();
    assert_eq!(with, with_floor(Priority::Low));
}

#[test]
fn a_refusal_is_said_once_and_in_words() {
    let nobody_has = (CpuSet::MAX_CPU - 1).to_string();
    let threads = DataThreads::new(params(Priority::Low, Some(&nobody_has)), |_| {});
    with_member(&threads, |_| with_member(&threads, |_| {}));
    let refused = threads.refused();
    let [refused] = refused.as_slice() else { panic!("{refused:?}") };
    assert!(refused.contains(&nobody_has) && refused.contains("only"), "{refused}");
    assert!(threads.refused().is_empty());
}

#[test]
fn a_panic_of_a_thread_is_reported_and_an_ordinary_end_is_not() {
    let (tell, told) = channel();
    let threads = DataThreads::new(SchedParams::default(), move |name| {
        tell.send(name.to_owned()).unwrap();
    });
    for (name, panics) in [("member", true), ("guarded", true), ("ordinary", false)] {
        let threads = Arc::clone(&threads);
        let run = move || {
            let _member = (name != "guarded").then(|| threads.join());
            let _guard = threads.guard();
            assert!(!panics, "on purpose");
        };
        let ended = thread::Builder::new().name(name.to_owned()).spawn(run).unwrap().join();
        assert_eq!(ended.is_err(), panics);
    }
    let mut names: Vec<String> = told.try_iter().collect();
    names.dedup();
    assert_eq!(names, ["member", "guarded"]);
}

#[test]
fn nice_values_stay_where_there_are_any() {
    for (priority, base, nice) in [
        (Priority::Low, 0, 5),
        (Priority::Low, 15, 19),
        (Priority::Normal, 5, 5),
        (Priority::High, 0, -5),
        (Priority::High, -18, -20),
    ] {
        assert_eq!(priority.nice(base), nice, "{priority:?} from {base}");
    }
}
