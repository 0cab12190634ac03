//! A VM that moves for long; `make long-life` moves it 200 times.

#[test]
fn agents_hold_no_more_after_twelve_moves() {
    end_to_end::long_life::live(12);
}
