//! Logits that are overwritten with their gradient, and the gradient of the embedding table.

use super::super::{cross_entropy, embedding};
use super::{Buffer, Element, assert_close, bits, gpu, numbers, wide};
use crate::kernels::cpu::{Stored, rows::cross_entropy as on_cpu};
use crate::kernels::workspace::embedding_backward;
use candle_core::cuda_backend::CudaDevice;
use half::{bf16, f16};

#[test]
#[ignore = "needs a CUDA device"]
fn logits_become_their_gradient() {
    let gpu = gpu();
    for (rows, classes) in [
        (1, 2),
        (37, 65),
        (300, 257),
        (9, 10_000),
        (3, 50_257),
        (2, 70_001),
    ] {
        for (offset, ignore) in [(0, None), (1, None), (0, Some(0)), (1, Some(0))] {
            loss::<f32>(&gpu, [rows, classes], offset, ignore);
            loss::<f16>(&gpu, [rows, classes], offset, ignore);
            loss::<bf16>(&gpu, [rows, classes], offset, ignore);
        }
    }
}

fn loss<T: Element>(
    gpu: &CudaDevice,
    [rows, classes]: [usize; 2],
    offset: usize,
    ignore: Option<u32>,
) {
    let (counted, dloss) = (rows + 11, 3f32);
    let logits = numbers::<T>(rows * classes, 1);
    let targets: Vec<u32> = (0..rows).map(|row| (row * 7919 % classes) as u32).collect();
    let (mut exact, mut exact_losses) = (wide(&logits), Vec::new());
    for (row, target) in exact.chunks_mut(classes).zip(&targets) {
        if Some(*target) == ignore {
            exact_losses.push(0.0);
            row.fill(0.0);
            continue;
        }
        let (target, total) = (*target as usize, row.iter().map(|x| x.exp()).sum::<f64>());
        exact_losses.push(total.ln() - row[target]);
        let share = f64::from(dloss) / counted as f64;
        row.iter_mut().for_each(|x| *x = x.exp() / total * share);
        row[target] -= share;
    }
    let ids = Buffer::new(gpu, &targets, 0);
    let of = |ids, counted| cross_entropy::Targets {
        ids,
        ignore,
        divisor: counted,
        terms: [0.0; 2],
    };
    let dloss = Buffer::new(gpu, &[dloss], 0);
    let losses = Buffer::<f32>::unwritten(gpu, rows, 0);
    for row_stride in [classes, classes.next_multiple_of(8), classes + 3] {
        let between = vec![T::from_f64(99.0); row_stride - classes]; // must not be read or written
        let rows = logits.chunks(classes);
        let apart: Vec<T> = rows.flat_map(|row| [row, &between].concat()).collect();
        let apart = Buffer::new(gpu, &apart, offset);
        cross_entropy::in_place(
            gpu,
            apart.view(gpu),
            [classes, row_stride],
            of(ids.view(gpu), counted),
            dloss.view(gpu),
            losses.view(gpu),
        )
        .unwrap();
        let got = apart.read(gpu);
        let rows = got.chunks(row_stride).map(|row| row.split_at(classes));
        assert!(rows.clone().all(|(_, rest)| wide(rest) == wide(&between)));
        let gradient: Vec<T> = rows.flat_map(|(row, _)| row.to_vec()).collect();
        assert_close("dlogits", &gradient, &exact);
        assert_close("losses", &losses.read(gpu), &exact_losses);
    }

    let mean = Buffer::<f64>::unwritten(gpu, 1, 0);
    let first = rows / 2;
    let view = losses.view(gpu);
    let rest = view.slice(first, rows - first);
    let add = |losses, accumulate| {
        cross_entropy::mean(gpu, losses, None, counted, mean.view(gpu), accumulate).unwrap();
    };
    add(rest, false);
    add(view.slice(0, first), true);
    let exact = wide(&losses.read(gpu)).iter().sum::<f64>() / counted as f64;
    let got = mean.read(gpu)[0];
    assert!((got - exact).abs() <= 1e-12 * exact, "{got} {exact}");

    // Divides by three times the number of targets that count.
    let counting = targets.iter().filter(|id| Some(**id) != ignore).count();
    if counting > 0 {
        let targets = Some(of(ids.view(gpu), 0));
        cross_entropy::mean(gpu, view, targets, 3, mean.view(gpu), true).unwrap();
        let exact = exact + exact * counted as f64 / (3 * counting) as f64;
        let got = mean.read(gpu)[0];
        assert!((got - exact).abs() <= 1e-12 * exact, "{got} {exact}");
    }
}

/// Label smoothing and a z-loss, with a gradient of each row's loss.
#[test]
#[ignore = "needs a CUDA device"]
fn terms_are_the_cpus() {
    let gpu = gpu();
    for (rows, classes) in [(1, 2), (37, 65), (9, 1031), (2, 50_257)] {
        for terms in [[0.1, 0.0], [0.0, 0.01], [0.2, 0.01]] {
            terms_of::<f32>(&gpu, [rows, classes], terms);
            terms_of::<f16>(&gpu, [rows, classes], terms);
            terms_of::<bf16>(&gpu, [rows, classes], terms);
        }
    }
}

fn terms_of<T: Element + Stored<Wide = f32>>(
    gpu: &CudaDevice,
    [rows, classes]: [usize; 2],
    terms: [f32; 2],
) {
    let logits = numbers::<T>(rows * classes, 1);
    let dloss = numbers::<f32>(rows, 2);
    let ids: Vec<u32> = (0..rows).map(|row| (row * 7919 % classes) as u32).collect();
    let [smoothing, z_loss] = terms;
    let terms_on_cpu = on_cpu::Terms { smoothing, z_loss };
    let target = |row: usize| Some(ids[row] as usize).filter(|id| *id != 0);
    let (mut losses, mut statistics) = (vec![0f32; rows], vec![0f32; 2 * rows]);
    on_cpu::forward(
        &logits,
        classes,
        target,
        terms_on_cpu,
        &mut losses,
        &mut statistics,
    );
    let gradient = |weight: &(dyn Fn(usize) -> f32 + Sync)| {
        let mut dlogits = vec![T::zero(); logits.len()];
        on_cpu::backward(
            &logits,
            classes,
            target,
            terms_on_cpu,
            &statistics,
            weight,
            &mut dlogits,
        );
        dlogits
    };
    let (of_rows, of_mean) = (
        gradient(&|row| dloss[row] / 3.0),
        gradient(&|_| dloss[0] / 3.0),
    );

    let [of_losses, of_dloss] = [&losses, &dloss].map(|x| Buffer::new(gpu, x, 0));
    let (of_logits, of_ids) = (Buffer::new(gpu, &logits, 1), Buffer::new(gpu, &ids, 0));
    let targets = cross_entropy::Targets {
        ids: of_ids.view(gpu),
        ignore: Some(0),
        divisor: 3,
        terms,
    };
    let of_statistics = Buffer::<f32>::unwritten(gpu, 2 * rows, 0);
    let [of_x, saved] = [of_logits.view(gpu), of_statistics.view(gpu)];
    cross_entropy::rows(gpu, of_x, targets, of_losses.view(gpu), saved).unwrap();
    assert_close("losses", &of_losses.read(gpu), &wide(&losses));
    let dlogits = Buffer::<T>::unwritten(gpu, logits.len(), 1);
    let [dy, dx] = [of_dloss.view(gpu), dlogits.view(gpu)];
    cross_entropy::backward(gpu, of_x, targets, saved, dy, dx).unwrap();
    assert_close("dlogits", &dlogits.read(gpu), &wide(&of_rows));
    let dy = dy.slice(0, 1);
    cross_entropy::in_place(gpu, of_x, [classes; 2], targets, dy, of_losses.view(gpu)).unwrap();
    assert_close("in place", &of_logits.read(gpu), &wide(&of_mean));
    assert_close("losses in place", &of_losses.read(gpu), &wide(&losses));
}

/// Targets that do not count are left out of the divisor.
#[test]
#[ignore = "needs a CUDA device"]
fn targets_are_counted() {
    let gpu = gpu();
    for rows in [1, 31, 1025, 5000] {
        let ignore = 3;
        let targets: Vec<u32> = (0..rows).map(|row| (row * 7 % 5) as u32).collect();
        let counted = targets.iter().filter(|id| **id != ignore).count();
        let ids = Buffer::new(&gpu, &targets, 1);
        let all = |ignore| cross_entropy::Targets {
            ids: ids.view(&gpu),
            ignore,
            divisor: 0,
            terms: [0.0; 2],
        };
        let (wide, narrow) = (Buffer::new(&gpu, &[5f64], 0), Buffer::new(&gpu, &[5f32], 0));
        for x in [wide.view(&gpu), narrow.view(&gpu)] {
            for (ignore, counted) in [(Some(ignore), counted), (None, rows)] {
                let y = Buffer::<f32>::unwritten(&gpu, 1, 0);
                cross_entropy::divide_by_counted(&gpu, all(ignore), x, y.view(&gpu)).unwrap();
                assert_eq!(y.read(&gpu), [(5.0 / counted as f64) as f32]);
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn gradients_of_rows_that_occur() {
    let gpu = gpu();
    for width in [1, 33, 512] {
        for accumulate in [false, true] {
            // Padding ids: one occurs a few times, one for each of the other paths, and one never occurs.
            for padding_id in [None, Some(0), Some(7), Some(6), Some(5), Some(299)] {
                rows_of_a_table::<f32, f32>(&gpu, width, accumulate, padding_id);
                rows_of_a_table::<bf16, f32>(&gpu, width, accumulate, padding_id);
                rows_of_a_table::<f16, f32>(&gpu, width, accumulate, padding_id);
                rows_of_a_table::<bf16, bf16>(&gpu, width, accumulate, padding_id);
                rows_of_a_table::<f16, f16>(&gpu, width, accumulate, padding_id);
            }
        }
    }
}

fn rows_of_a_table<G: Element, T: Element>(
    gpu: &CudaDevice,
    width: usize,
    accumulate: bool,
    padding_id: Option<u32>,
) {
    let (count, vocab) = (1000, 300);
    // Most ids occur a few times or never; for each path with more positions there is one id.
    let id = |i: usize| match (i % 64, i % 16) {
        (1, _) => 7, // more than a warp sums, fewer than a bucket holds
        (_, 8) => 6,
        (_, sixteenth) if sixteenth.is_multiple_of(2) => 5,
        _ => (i * 31 + i % 7) % vocab,
    };
    let ids: Vec<u32> = (0..count).map(|i| id(i) as u32).collect();
    let (dy, before) = (
        numbers::<G>(count * width, 1),
        numbers::<T>(vocab * width, 2),
    );
    let mut exact = match accumulate {
        true => wide(&before),
        false => vec![0.0; vocab * width],
    };
    for (id, dy) in ids.iter().zip(dy.chunks(width)) {
        if Some(*id) == padding_id {
            continue;
        }
        for (i, dy) in dy.iter().enumerate() {
            exact[*id as usize * width + i] += dy.to_f64();
        }
    }
    let (ids, dy) = (Buffer::new(gpu, &ids, 0), Buffer::new(gpu, &dy, 0));
    let run = || {
        let table = match accumulate {
            true => Buffer::new(gpu, &before, 0),
            false => Buffer::unwritten(gpu, vocab * width, 0),
        };
        let words = embedding_backward(count, vocab).iter().sum();
        let workspace = Buffer::<u32>::unwritten(gpu, words, 0);
        embedding::backward(
            gpu,
            dy.view(gpu),
            ids.view(gpu),
            padding_id,
            table.view(gpu),
            accumulate,
            workspace.view(gpu),
        )
        .unwrap();
        workspace.read(gpu);
        table.read(gpu)
    };
    let (first, second) = (run(), run());
    assert_close("dtable", &first, &exact);
    assert_eq!(bits(&first), bits(&second));
}
