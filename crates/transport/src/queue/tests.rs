//! Batches that are sent, returned and answered.

use std::sync::Arc;
use std::thread;

use page::Pool;
use proptest::prelude::*;

use super::*;

/// Lanes that can't connect also wait, but take no batch: if one of them were woken
/// for it, the batch would be left lying.
#[test]
fn a_batch_wakes_a_lane_that_takes_it() {
    const DEAD: usize = 8;
    let pool = page::Pool::new(1 << 20);
    let queue = Queue::<Infallible>::new();
    queue.lane_up();
    let second = Duration::from_secs(1);
    let pause = Pause { alone: second, beside_others: second };
    thread::scope(|scope| {
        for _ in 0..DEAD {
            scope.spawn(|| while queue.could_not_connect("x", pause) {});
        }
        // Most of them are waiting by now; it does not matter which.
        thread::sleep(Duration::from_millis(50));
        let carrier = scope.spawn(|| {
            let mut carried = 0;
            while let Work::Send(load) = queue.take(|| false, &mut 0) {
                carried += 1;
                queue.placed(load);
            }
            carried
        });
        for _ in 0..100 {
            queue.submit(pool.take().unwrap().into()).unwrap();
            queue.wait_drained().unwrap();
        }
        queue.close();
        assert_eq!(carrier.join().unwrap(), 100);
    });
}

#[test]
fn blocks_count_apart_from_pages_and_only_pages_make_lanes_busy() {
    let pool = page::Pool::new(4 * page::SLOT_BYTES);
    let queue = Queue::<Infallible>::new();
    let mut blocks = pool.take_blocks().unwrap();
    blocks.push_data(1024);
    blocks.push_zero(4096);
    queue.submit(blocks.into()).unwrap();
    assert!(queue.state.lock().busy_since.is_none());
    let mut pages = pool.take().unwrap();
    pages.push_body(page::PageIndex(3), 0);
    queue.submit(pages.into()).unwrap();
    let counted = queue.delivered();
    assert_eq!((counted.backlog_bytes, counted.block_backlog_bytes), (4096, 1024));
    for _ in 0..2 {
        let Work::Send(load) = queue.take(|| false, &mut 0) else { panic!("two are there") };
        queue.placed(load);
    }
    let counted = queue.delivered();
    assert_eq!((counted.body_bytes, counted.batches, counted.backlog_bytes), (4096, 1, 0));
    assert_eq!((counted.block_bytes, counted.block_zero_bytes), (1024, 4096));
    assert_eq!(counted.block_backlog_bytes, 0);
    queue.wait_drained().unwrap();
}

fn page(pool: &Arc<Pool>) -> Load {
    let mut pages = pool.take().unwrap();
    pages.push_body(page::PageIndex(0), 0);
    pages.into()
}

fn blocks(pool: &Arc<Pool>, sequence: u64) -> Load {
    let mut blocks = pool.take_blocks().unwrap();
    blocks.sequence = sequence;
    blocks.push_data(512);
    blocks.into()
}

/// The number of a batch of blocks; none for pages.
fn number(load: &Load) -> Option<u64> {
    match load {
        Load::Blocks(batch) => Some(batch.sequence),
        _ => None,
    }
}

#[test]
fn pages_pass_blocks_that_have_no_room() {
    let pool = Pool::new(16 * page::SLOT_BYTES);
    let queue = Queue::<Infallible>::new();
    queue.set_block_room(2);
    for sequence in 0..4 {
        queue.submit(blocks(&pool, sequence)).unwrap();
        queue.submit(page(&pool)).unwrap();
    }
    let take = || queue.state.lock().next();
    let went: Vec<_> = std::iter::from_fn(take).collect();
    let numbers: Vec<_> = went.iter().map(number).collect();
    assert_eq!(numbers, [Some(0), None, Some(1), None, None, None]);
    assert_eq!(queue.delivered().blocks_held, 2);
    // The room is a total, and never falls.
    queue.set_block_room(3);
    queue.set_block_room(1);
    let third = take().unwrap();
    assert_eq!(number(&third), Some(2));
    assert!(take().is_none());
    // A dead lane's batch needs no room: it already has some.
    queue.hand_back([third].into_iter());
    let third = take().unwrap();
    assert_eq!(number(&third), Some(2));
    for load in went.into_iter().chain([third]) {
        queue.placed(load);
    }
    queue.close();
    queue.set_block_room(4);
    let Work::Send(last) = queue.take(|| false, &mut 0) else { panic!("there is room for it") };
    queue.placed(last);
    assert!(matches!(queue.take(|| false, &mut 0), Work::Over(Sent::All)));
}

#[test]
fn unanswered_batches_hold_up_waiting_ones() {
    let pool = Pool::new((ASKED_MAX + 4) * page::SLOT_BYTES);
    let queue = Queue::<usize>::new();
    let submit = || queue.submit(Load::from(pool.take().unwrap())).unwrap();
    let take = || queue.state.lock().next();
    let asked: Vec<Load<usize>> = (0..ASKED_MAX)
        .map(|nth| {
            submit();
            assert!(matches!(take(), Some(Load::Pages(_))));
            queue.adds_query();
            Load::Other(nth)
        })
        .collect();
    submit();
    assert!(take().is_none());
    queue.settle(Change { left: 1, answered: 1, ..Change::default() });
    queue.placed(take().unwrap());
    // A lane has died: all its batches are sent again, before those that wait.
    queue.hand_back(asked.into_iter().skip(1));
    submit();
    let back: Vec<_> = std::iter::from_fn(take).collect();
    assert_eq!(back.len(), ASKED_MAX);
    for (nth, load) in (1..).zip(&back[..ASKED_MAX - 1]) {
        assert!(matches!(load, Load::Other(it) if *it == nth));
    }
}

/// A batch that a stage holds is neither lost nor drained, and a waiting lane checks
/// for work when the stage reports an outcome.
#[test]
fn a_batch_held_by_a_stage_is_out_until_it_has_left() {
    let queue = Queue::<&str>::new();
    assert_eq!(queue.reserve(|| false, |awaited, first| awaited == 0 && first == 0), Some(()));
    thread::scope(|scope| {
        let drained = scope.spawn(|| queue.wait_drained());
        queue.submit_first("asks", 8192);
        let mut seen = 0;
        let Work::Send(Load::Other("asks")) = queue.take(|| false, &mut seen) else { panic!() };
        let waits = Change { entered: 1, awaited_bytes: Some(8192), ..Change::default() };
        queue.settle(Change { left: 1, ..waits });
        assert!(matches!(queue.take(|| false, &mut seen), Work::Settled));
        let counted = queue.delivered();
        assert_eq!((counted.backlog_bytes, counted.awaited_bytes), (8192, 8192));
        assert_eq!(queue.queued(|_| 1), Some(0));
        let again = [Some("wanted"), None];
        let found =
            Change { left: 1, found_bytes: 4096, awaited_bytes: Some(0), ..Change::default() };
        queue.settle(Change { again, ..found });
        assert_eq!(queue.queued(|_| 1), Some(1));
        assert!(!drained.is_finished());
        let Work::Send(Load::Other("wanted")) = queue.take(|| false, &mut seen) else { panic!() };
        queue.count(Change { left: 1, body_bytes: 4096, ..Change::default() });
        drained.join().unwrap().unwrap();
    });
    let counted = queue.delivered();
    assert_eq!((counted.backlog_bytes, counted.awaited_bytes), (0, 0));
    assert_eq!((counted.body_bytes, counted.found_bytes), (4096, 4096));
    queue.close();
    assert_eq!(queue.reserve(|| false, |_, _| true), None);
}

#[test]
fn a_thread_waiting_to_reserve_checks_again_when_less_is_out_or_at_the_end() {
    let queue = Queue::<()>::new();
    let over = std::sync::atomic::AtomicBool::new(false);
    let is_over = || over.load(std::sync::atomic::Ordering::SeqCst);
    let reserve = || queue.reserve(is_over, |awaited, _| awaited < 10);
    thread::scope(|scope| {
        queue.settle(Change { entered: 1, awaited_bytes: Some(10), ..Change::default() });
        let waits = scope.spawn(reserve);
        queue.settle(Change { left: 1, awaited_bytes: Some(9), ..Change::default() });
        assert_eq!(waits.join().unwrap(), Some(()));
        queue.settle(Change { awaited_bytes: Some(10), ..Change::default() });
        let waits = scope.spawn(reserve);
        over.store(true, std::sync::atomic::Ordering::SeqCst);
        queue.wake_reserving();
        assert_eq!(waits.join().unwrap(), None);
    });
    queue.give_up();
    queue.wait_drained().unwrap();
}

#[test]
fn room_wakes_a_lane_and_a_failure_drops_what_has_none() {
    let pool = Pool::new(4 * page::SLOT_BYTES);
    let queue = Queue::<Infallible>::new();
    queue.set_block_room(0);
    thread::scope(|scope| {
        let lane = scope.spawn(|| match queue.take(|| false, &mut 0) {
            Work::Send(load) => queue.placed(load),
            _ => panic!("there is a batch"),
        });
        queue.submit(blocks(&pool, 0)).unwrap();
        queue.set_block_room(1);
        lane.join().unwrap();
    });
    queue.wait_drained().unwrap();
    queue.submit(blocks(&pool, 1)).unwrap();
    assert!(queue.state.lock().next().is_none());
    queue.fail(LanesError::Stopped);
    assert_eq!(pool.out_bytes(), 0);
}

/// An event of a queue.
#[derive(Clone, Debug)]
enum Step {
    Submit { is_page: bool },
    Room(u64),
    Take,
    Place,
    Die,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => any::<bool>().prop_map(|is_page| Step::Submit { is_page }),
        1 => (0..12_u64).prop_map(Step::Room),
        4 => Just(Step::Take),
        2 => Just(Step::Place),
        1 => Just(Step::Die),
    ]
}

proptest! {
    /// Whatever lanes take, place and lose: no more batches of blocks are in flight
    /// than there is room for, each is placed once and in the end all are, and no page
    /// waits for room.
    #[test]
    fn room_bounds_blocks_and_holds_nothing_else_up(
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let pool = Pool::new(256 * page::SLOT_BYTES);
        let queue = Queue::<Infallible>::new();
        let (mut room, mut submitted, mut pages_waiting) = (0, 0, 0_usize);
        let mut flying: Vec<Load> = Vec::new();
        let mut taken = std::collections::BTreeSet::new();
        let mut placed = Vec::new();
        queue.set_block_room(0);
        for step in steps.into_iter().chain([Step::Room(u64::MAX)]) {
            match step {
                Step::Submit { is_page: true } => {
                    queue.submit(page(&pool)).unwrap();
                    pages_waiting += 1;
                }
                Step::Submit { is_page: false } => {
                    queue.submit(blocks(&pool, submitted)).unwrap();
                    submitted += 1;
                }
                Step::Room(batches) => {
                    room = room.max(batches);
                    queue.set_block_room(batches);
                }
                Step::Take => match queue.state.lock().next() {
                    Some(load) => {
                        match number(&load) {
                            Some(sequence) => drop(taken.insert(sequence)),
                            None => pages_waiting -= 1,
                        }
                        prop_assert!(taken.len() as u64 <= room);
                        // Batches that were never sent go in order.
                        prop_assert!(taken.iter().copied().eq(0..taken.len() as u64));
                        flying.push(load);
                    }
                    None => prop_assert_eq!(pages_waiting, 0),
                },
                Step::Place if !flying.is_empty() => {
                    let load = flying.remove(0);
                    placed.extend(number(&load));
                    queue.placed(load);
                }
                Step::Place => {}
                Step::Die => {
                    pages_waiting += flying.iter().filter(|load| number(load).is_none()).count();
                    queue.hand_back(std::mem::take(&mut flying).into_iter());
                }
            }
        }
        flying.extend(std::iter::from_fn(|| queue.state.lock().next()));
        for load in flying {
            placed.extend(number(&load));
            queue.placed(load);
        }
        queue.wait_drained().unwrap();
        placed.sort_unstable();
        prop_assert!(placed.into_iter().eq(0..submitted));
        prop_assert_eq!(pool.out_bytes(), 0);
    }
}

#[test]
fn batches_handed_back_after_a_failure_are_dropped() {
    let pool = page::Pool::new(4 * page::SLOT_BYTES);
    let queue = Queue::<Infallible>::new();
    queue.submit(pool.take().unwrap().into()).unwrap();
    let Work::Send(load) = queue.take(|| false, &mut 0) else { panic!("one is there") };
    queue.fail(LanesError::Stopped);
    queue.hand_back(std::iter::once(load));
    assert_eq!(pool.out_bytes(), 0);
}

#[test]
fn a_lane_rests_only_while_another_has_a_connection() {
    let queue = Queue::<Infallible>::new();
    queue.lane_up();
    let rests = Pause { alone: Duration::ZERO, beside_others: Duration::from_secs(86_400) };
    thread::scope(|scope| {
        let resting = scope.spawn(|| queue.could_not_connect("x", rests));
        // Whether it rests by now or not.
        queue.lane_down();
        assert!(resting.join().unwrap(), "it connects again");
        queue.lane_up();
        let resting = scope.spawn(|| queue.could_not_connect("x", rests));
        queue.close();
        assert!(!resting.join().unwrap(), "it has nothing to carry any more");
    });
}
