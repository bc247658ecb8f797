//! What a call of an op does to memory, step by step.

/// One step of an op's forward or of its backward: what it makes, takes for itself and gives back, in the order of its
/// kernels. Sums of gradients that several ops make are no part of it.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum MemoryStep {
    /// Makes the output.
    Output,
    /// Makes the one of [`Node::kept`](super::Node::kept) with this index.
    Keep(usize),
    /// Makes something that lasts as long as what is kept, and is no tensor.
    Hold(Room),
    /// Takes room until the pass is done.
    Take(Room),
    /// Gives back the room that was taken as the one with this index, sooner.
    GiveBack(usize),
    /// Takes room for this step alone.
    Pass(Room),
    /// Drops the one of [`Node::reads`](super::Node::reads) with this index.
    DropRead(usize),
    /// Drops the one of [`Node::kept`](super::Node::kept) with this index.
    DropKept(usize),
    /// Makes the gradient of the one of [`Node::inputs`](super::Node::inputs) with this index.
    Gradient(usize),
    /// The output's gradient is that of the input with this index, too: nothing is made.
    PassThrough(usize),
}

/// Room for elements that are no tensor of the graph.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Room {
    /// What it is for.
    pub what: &'static str,
    /// How many elements, in letters.
    pub formula: &'static str,
    /// How many elements. In f64: exact to 2^53, and no overflow beyond.
    pub elements: f64,
    /// Bytes an element.
    pub element_bytes: usize,
}
