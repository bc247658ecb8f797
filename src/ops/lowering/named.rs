//! Operands by name.

/// The operands of a call, each with its name in the formula of the op or kernel (`x`, `weight`, `dy`), in the order in
/// which that has them. One that a call does without is not there. Several may share a name, where a kernel takes any
/// number of them.
#[derive(Clone, Debug, PartialEq)]
pub struct Named<T>(Vec<(&'static str, T)>);

impl<T> Named<T> {
    /// The first with this name.
    pub fn get(&self, name: &str) -> Option<&T> {
        let mut entries = self.0.iter();
        entries.find_map(|(other, operand)| (*other == name).then_some(operand))
    }

    /// The first of all.
    pub fn first(&self) -> Option<&T> {
        self.iter().next()
    }

    /// The operands, in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &T> + Clone {
        self.0.iter().map(|(_, operand)| operand)
    }

    /// Names and operands, in order.
    pub fn entries(&self) -> &[(&'static str, T)] {
        &self.0
    }

    /// The operand that every call of its kind has. Panics if this call has none: a bug of the code that made it.
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

    /// With one more.
    pub(crate) fn with(mut self, name: &'static str, operand: T) -> Self {
        self.push(name, operand);
        self
    }

    /// With one more, if it is there.
    pub(crate) fn with_some(self, name: &'static str, operand: Option<T>) -> Self {
        match operand {
            Some(operand) => self.with(name, operand),
            None => self,
        }
    }

    /// With these after them.
    pub(crate) fn and(mut self, others: impl Into<Self>) -> Self {
        self.0.extend(others.into().0);
        self
    }

    /// What `f` makes of each, if it makes something of all.
    pub(crate) fn try_map<U>(&self, mut f: impl FnMut(&T) -> Option<U>) -> Option<Named<U>> {
        let entries = self.0.iter();
        let made = entries.map(|(name, operand)| Some((*name, f(operand)?)));
        made.collect::<Option<_>>().map(Named)
    }

    /// What `f` makes of each.
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
