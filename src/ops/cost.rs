//! What an op has to do, by its formula; and the formulas that several ops share.

pub use crate::probe::Cost;
use crate::probe::{Operand, Operands};

/// What an op's operands say of its cost: one entry of [`op_costs`](crate::profile::op_costs).
#[derive(Clone, Copy, Debug)]
pub struct OpCost {
    /// The op's name.
    pub op: &'static str,
    /// Its FLOPs, in words.
    pub flops: &'static str,
    /// Its bytes, in words.
    pub bytes: &'static str,
    /// What the op holds that others time apart.
    pub inside: Option<&'static str>,
    pub(crate) forward: Formula,
    /// `None` where backward is candle's own.
    pub(crate) backward: Option<Formula>,
}

/// The cost of a call with these operands; `None` where they are not those of the op.
pub(crate) type Formula = fn(&Operands<'_>) -> Option<Cost>;

impl Operand<'_> {
    /// How many elements.
    pub(crate) fn elements(&self) -> f64 {
        self.dims.iter().map(|&n| n as f64).product()
    }

    /// What its elements take.
    pub(crate) fn bytes(&self) -> f64 {
        self.elements() * self.dtype.size_in_bytes() as f64
    }

    /// Both.
    pub(crate) fn size(&self) -> (f64, f64) {
        (self.elements(), self.bytes())
    }

    /// The last dimension; 1 for a scalar.
    pub(crate) fn last(&self) -> f64 {
        self.dims.last().map_or(1.0, |&n| n as f64)
    }
}

impl<'a> Operands<'a> {
    /// Input `i`.
    pub(crate) fn input(&self, i: usize) -> Option<&Operand<'a>> {
        self.inputs.get(i)
    }

    /// Bytes of all inputs.
    pub(crate) fn input_bytes(&self) -> f64 {
        self.inputs.iter().map(Operand::bytes).sum()
    }

    /// Bytes of x and of the weights as products read them: in x's dtype, though a weight under autocast is an f32 with
    /// a copy.
    fn product_bytes(&self) -> Option<f64> {
        let width = self.input(0)?.dtype.size_in_bytes() as f64;
        Some(self.inputs.iter().map(|x| x.elements() * width).sum())
    }

    /// Reads its inputs, writes its output, `flops` an element of that.
    pub(crate) fn elementwise(&self, flops: f64) -> Option<Cost> {
        let flops = flops * self.output.elements();
        cost(0.0, flops, self.input_bytes(), self.output.bytes())
    }

    /// Reads the output's gradient and the inputs, writes the inputs' gradients.
    pub(crate) fn elementwise_backward(&self, flops: f64) -> Option<Cost> {
        let flops = flops * self.output.elements();
        let read = self.output.bytes() + self.input_bytes();
        cost(0.0, flops, read, self.input_bytes())
    }

    /// As [`elementwise`](Self::elementwise), by the first input's elements: for sums.
    pub(crate) fn reduction(&self, flops: f64) -> Option<Cost> {
        let flops = flops * self.input(0)?.elements();
        cost(0.0, flops, self.input_bytes(), self.output.bytes())
    }

    /// The output's gradient for the input's, elsewhere, `flops` an element: what several were given is added up.
    pub(crate) fn moved_back(&self, flops: f64) -> Option<Cost> {
        let flops = flops * self.output.elements();
        cost(0.0, flops, self.output.bytes(), self.input_bytes())
    }

    /// Products of x, whose last dimension is the depth, with weights: they make so many elements, of so many bytes.
    /// `flops` an element and unit of depth, `besides` an element.
    pub(crate) fn products(&self, made: (f64, f64), flops: f64, besides: f64) -> Option<Cost> {
        let (elements, bytes) = made;
        let flops = flops * elements * self.input(0)?.last();
        cost(flops, besides * elements, self.product_bytes()?, bytes)
    }

    /// Reads what [`products`](Self::products) read, and what they made or its gradient; writes the inputs' gradients.
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

/// Products, other FLOPs, bytes read, bytes written.
pub(crate) fn cost(products: f64, others: f64, read: f64, written: f64) -> Option<Cost> {
    Some(Cost {
        product_flops: products,
        other_flops: others,
        softmax_flops: 0.0,
        read_bytes: read,
        written_bytes: written,
    })
}

/// A cost whose FLOPs, apart from the matrix products', are all softmax's.
pub(crate) fn of_softmax(cost: Cost) -> Cost {
    Cost {
        softmax_flops: cost.other_flops,
        ..cost
    }
}
