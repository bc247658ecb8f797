//! Cost formulas of ops, and helpers that several formulas share.

pub use crate::probe::Cost;
use crate::probe::{Operand, Operands};

/// The cost of an op in terms of its operands: an entry of [`op_costs`](crate::profile::op_costs).
#[derive(Clone, Copy, Debug)]
pub struct OpCost {
    /// The op's name.
    pub op: &'static str,
    /// The FLOPs, in words.
    pub flops: &'static str,
    /// The bytes, in words.
    pub bytes: &'static str,
    /// The parts of the op that other implementations time separately, in words; `None` if it has none.
    pub inside: Option<&'static str>,
    pub(crate) forward: Formula,
    /// The formula of backward; `None` if backward is candle's own.
    pub(crate) backward: Option<Formula>,
}

/// The cost of a call with these operands; `None` if the operands do not fit the op.
pub(crate) type Formula = fn(&Operands<'_>) -> Option<Cost>;

impl Operand<'_> {
    pub(crate) fn elements(&self) -> f64 {
        self.dims.iter().map(|&n| n as f64).product()
    }

    pub(crate) fn bytes(&self) -> f64 {
        self.elements() * self.dtype.size_in_bytes() as f64
    }

    /// Returns the number of elements and the bytes.
    pub(crate) fn size(&self) -> (f64, f64) {
        (self.elements(), self.bytes())
    }

    /// Returns the last dimension; 1 for a scalar.
    pub(crate) fn last(&self) -> f64 {
        self.dims.last().map_or(1.0, |&n| n as f64)
    }
}

impl<'a> Operands<'a> {
    pub(crate) fn input(&self, i: usize) -> Option<&Operand<'a>> {
        self.inputs.get(i)
    }

    pub(crate) fn input_bytes(&self) -> f64 {
        self.inputs.iter().map(Operand::bytes).sum()
    }

    /// Returns the bytes of x and the weights as matmuls read them: in x's dtype. Under autocast an f32 weight is read
    /// as its copy.
    fn product_bytes(&self) -> Option<f64> {
        let width = self.input(0)?.dtype.size_in_bytes() as f64;
        Some(self.inputs.iter().map(|x| x.elements() * width).sum())
    }

    /// Returns the cost of reading the inputs and writing the output, with `flops` per output element.
    pub(crate) fn elementwise(&self, flops: f64) -> Option<Cost> {
        let flops = flops * self.output.elements();
        cost(0.0, flops, self.input_bytes(), self.output.bytes())
    }

    /// Returns the cost of reading the output's gradient and the inputs and writing the inputs' gradients, with `flops`
    /// per output element.
    pub(crate) fn elementwise_backward(&self, flops: f64) -> Option<Cost> {
        let flops = flops * self.output.elements();
        let read = self.output.bytes() + self.input_bytes();
        cost(0.0, flops, read, self.input_bytes())
    }

    /// Returns the cost of a sum: [`elementwise`](Self::elementwise) with `flops` per element of the first input.
    pub(crate) fn reduction(&self, flops: f64) -> Option<Cost> {
        let flops = flops * self.input(0)?.elements();
        cost(0.0, flops, self.input_bytes(), self.output.bytes())
    }

    /// Returns the cost of moving the output's gradient to the input's, with `flops` per output element to sum
    /// gradients of one input element.
    pub(crate) fn moved_back(&self, flops: f64) -> Option<Cost> {
        let flops = flops * self.output.elements();
        cost(0.0, flops, self.output.bytes(), self.input_bytes())
    }

    /// Returns the cost of matmuls of x, whose last dimension is the depth, with weights. `made` is the elements and
    /// bytes of the results. Each element costs `flops` per unit of depth, and the last argument once.
    pub(crate) fn products(&self, made: (f64, f64), flops: f64, besides: f64) -> Option<Cost> {
        let (elements, bytes) = made;
        let flops = flops * elements * self.input(0)?.last();
        cost(flops, besides * elements, self.product_bytes()?, bytes)
    }

    /// Returns the cost of the backward of [`products`](Self::products), which also reads the results or their
    /// gradients, and writes the inputs' gradients.
    pub(crate) fn products_backward(
        &self,
        made: (f64, f64),
        flops: f64,
        besides: f64,
    ) -> Option<Cost> {
        let forward = self.products(made, flops, besides)?;
        Some(Cost {
            read_bytes: forward.written_bytes + forward.read_bytes,
            written_bytes: self.input_bytes(),
            ..forward
        })
    }
}

/// Returns a cost of matmul FLOPs, other FLOPs, bytes read and bytes written.
pub(crate) fn cost(products: f64, others: f64, read: f64, written: f64) -> Option<Cost> {
    Some(Cost {
        matmul_flops: products,
        other_flops: others,
        softmax_flops: 0.0,
        read_bytes: read,
        written_bytes: written,
    })
}

/// Returns the cost with all FLOPs outside of matmuls counted as softmax's.
pub(crate) fn of_softmax(cost: Cost) -> Cost {
    Cost {
        softmax_flops: cost.other_flops,
        ..cost
    }
}
