//! Named operands of calls.

/// The operands of a call, each with its name in the formula of the op or kernel (`x`, `weight`, `dy`), in that order.
/// An operand that the call does not have is missing. Several may share a name, for kernels with any number of inputs.
#[derive(Clone, Debug, PartialEq)]
pub struct Named<T>(Vec<(&'static str, T)>);

impl<T> Named<T> {
    /// Returns the first operand with this name.
    pub fn get(&self, name: &str) -> Option<&T> {
        let mut entries = self.0.iter();
        entries.find_map(|(other, operand)| (*other == name).then_some(operand))
    }

    /// Returns the first operand.
    pub fn first(&self) -> Option<&T> {
        self.iter().next()
    }

    /// Returns the operands, in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &T> + Clone {
        self.0.iter().map(|(_, operand)| operand)
    }

    /// Returns names and operands, in order.
    pub fn entries(&self) -> &[(&'static str, T)] {
        &self.0
    }

    /// Returns an operand that every call of this kind has. Panics if it is missing: a bug of the code that built the
    /// call.
    pub(crate) fn operand(&self, name: &str) -> &T {
        match self.get(name) {
            Some(operand) => operand,
            None => panic!("no operand {name}"),
        }
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.0.iter_mut().map(|(_, operand)| operand)
    }

    pub(crate) fn push(&mut self, name: &'static str, operand: T) {
        self.0.push((name, operand));
    }

    /// Adds an operand.
    pub(crate) fn with(mut self, name: &'static str, operand: T) -> Self {
        self.push(name, operand);
        self
    }

    /// Adds an operand, if it is `Some`.
    pub(crate) fn with_some(self, name: &'static str, operand: Option<T>) -> Self {
        match operand {
            Some(operand) => self.with(name, operand),
            None => self,
        }
    }

    /// Appends operands.
    pub(crate) fn and(mut self, others: impl Into<Self>) -> Self {
        self.0.extend(others.into().0);
        self
    }

    /// Applies `f` to each operand; `None` if it returns `None` for any.
    pub(crate) fn try_map<U>(&self, mut f: impl FnMut(&T) -> Option<U>) -> Option<Named<U>> {
        let entries = self.0.iter();
        let made = entries.map(|(name, operand)| Some((*name, f(operand)?)));
        made.collect::<Option<_>>().map(Named)
    }

    /// Applies `f` to each operand.
    pub(crate) fn map<U>(&self, mut f: impl FnMut(&T) -> U) -> Named<U> {
        let entries = self.0.iter();
        Named(entries.map(|(name, operand)| (*name, f(operand))).collect())
    }
}

impl<T, const N: usize> From<[(&'static str, T); N]> for Named<T> {
    fn from(entries: [(&'static str, T); N]) -> Self {
        Self(entries.into())
    }
}

impl<T> From<Vec<(&'static str, T)>> for Named<T> {
    fn from(entries: Vec<(&'static str, T)>) -> Self {
        Self(entries)
    }
}
