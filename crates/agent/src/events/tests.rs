use super::*;

fn events(ring_bytes: usize) -> Arc<Events> {
    Events::new(Limits { ring_bytes, ..Limits::default() }).unwrap()
}

fn settled(number: usize) -> Happening {
    Happening::VmSettled { vm: format!("web{number}") }
}

/// The events that a reader gets without waiting; frames without data are skipped.
async fn had(reader: &mut Reader) -> Vec<Event> {
    let mut had = Vec::new();
    while let Ok(Some(frame)) = tokio::time::timeout(Duration::ZERO, reader.next()).await {
        let text = String::from_utf8(frame.to_vec()).unwrap();
        let data = text.lines().find_map(|line| line.strip_prefix("data: "));
        had.extend(data.map(|json| serde_json::from_str::<Event>(json).unwrap()));
    }
    had
}

fn whats(events: &[Event]) -> Vec<Happening> {
    events.iter().map(|event| event.what.clone()).collect()
}

#[tokio::test]
async fn a_ring_keeps_the_latest_within_its_bytes() {
    let events = events(1000);
    for number in 0..100 {
        events.publish(settled(number));
        assert!(events.ring.lock().bytes <= 1000);
    }
    let mut reader = events.read(Some(&events.id(0))).unwrap();
    let had = had(&mut reader).await;
    assert_eq!(had[0].what, Happening::Gap { why: GapReason::TooOld });
    let kept = events.ring.lock().frames.len();
    assert!(kept > 2 && had.len() == kept + 1, "{kept}");
    let last: Vec<Happening> = (100 - kept..100).map(settled).collect();
    assert_eq!(whats(&had[1..]), last);
}

#[tokio::test]
async fn an_event_that_is_larger_than_the_ring_is_a_gap() {
    let events = events(1000);
    let mut reader = events.read(None).unwrap();
    events.publish(Happening::VmSettled { vm: "w".repeat(2000) });
    events.publish(settled(1));
    let gap = Happening::Gap { why: GapReason::TooOld };
    assert_eq!(whats(&had(&mut reader).await), [gap, settled(1)]);
}

#[tokio::test]
async fn a_reader_can_resume_after_a_gap() {
    let events = events(1000);
    (0..100).for_each(|number| events.publish(settled(number)));
    let all = had(&mut events.read(Some("of-another-start-1")).unwrap()).await;
    assert_eq!(all[0].what, Happening::Gap { why: GapReason::Unknown });
    let again = had(&mut events.read(Some(&all[0].id)).unwrap()).await;
    assert_eq!(again, all[1..]);
}

#[tokio::test]
async fn an_id_that_is_not_of_this_start_gives_a_gap_with_the_reason() {
    let (one, other) = (events(1000), events(1000));
    one.publish(settled(1));
    for (id, why) in [
        (other.id(1), GapReason::Restarted),
        (one.id(2), GapReason::Unknown),
        ("".to_owned(), GapReason::Unknown),
        ("7".to_owned(), GapReason::Unknown),
        (one.id(1) + "0000000000000000000000000", GapReason::Unknown),
    ] {
        let had = had(&mut one.read(Some(&id)).unwrap()).await;
        assert_eq!(whats(&had), [Happening::Gap { why }, settled(1)], "{id}");
    }
}

#[test]
fn long_texts_are_cut_between_letters() {
    assert_eq!(shortened("why"), "why");
    let long = shortened(&"ä".repeat(3000));
    assert_eq!(long.chars().count(), TEXT_LETTERS_MAX + 1);
}
