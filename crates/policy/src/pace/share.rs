//! Divides bandwidth.

/// One participant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Part {
    /// What it can use, as far as is known.
    pub(super) want: f64,
    /// What it may use.
    pub(super) most: f64,
}

/// Divides `total` equally up to the wants. The rest is divided equally too, up to what each may
/// use, because a want is a guess from the past.
pub(super) fn share(total: f64, parts: &[Part]) -> Vec<f64> {
    let wants: Vec<f64> = parts.iter().map(|part| part.want.min(part.most)).collect();
    let mut given = level(total, &wants);
    let left = total - given.iter().sum::<f64>();
    let rooms: Vec<f64> = parts.iter().zip(&given).map(|(part, now)| part.most - now).collect();
    for (now, more) in given.iter_mut().zip(level(left, &rooms)) {
        *now += more;
    }
    given
}

/// Divides `total` as water fills vessels of these sizes: to the same level, or to the brim.
fn level(total: f64, sizes: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    order.sort_by(|one, other| sizes[*one].total_cmp(&sizes[*other]));
    let mut given = vec![0.0; sizes.len()];
    let mut left = total.max(0.0);
    for (nth, vessel) in order.iter().enumerate() {
        given[*vessel] = sizes[*vessel].max(0.0).min(left / (sizes.len() - nth) as f64);
        left -= given[*vessel];
    }
    given
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_parts_but_no_more_than_wanted_while_others_want_it() {
        let any = f64::INFINITY;
        let part = |want, most| Part { want, most };
        let cases = [
            (9.0, vec![part(any, any); 3], vec![3.0, 3.0, 3.0]),
            (9.0, vec![part(1.0, any), part(any, any)], vec![1.0, 8.0]),
            (9.0, vec![part(1.0, any), part(2.0, any)], vec![4.0, 5.0]),
            (9.0, vec![part(any, 2.0), part(any, any)], vec![2.0, 7.0]),
            (9.0, vec![part(any, 2.0), part(1.0, 3.0)], vec![2.0, 3.0]),
            (9.0, vec![part(any, 0.0), part(any, -1.0)], vec![0.0, 0.0]),
            (0.0, vec![part(any, any)], vec![0.0]),
            (9.0, vec![], vec![]),
        ];
        for (total, parts, expected) in cases {
            assert_eq!(share(total, &parts), expected, "{total} among {parts:?}");
        }
    }
}
