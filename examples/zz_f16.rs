type T = half::f16;
include!("zz_body.inc");
fn softmax_backward(dp: &[T], _p: &[T], x: &[T], t: usize, mask: Mask, dx: &mut [T]) {
    softmax::backward_from_scores(dp, x, t, t, 0.2, mask, dx)
}
