//! The difference between two traces of one function.

use super::data::{Graph, Node, TraceEvent};

impl Graph {
    /// Describes the first node at which a later trace of the same function differs. Returns `None` if the traces are
    /// equal; the points at which tensors are dropped are not compared.
    pub(crate) fn difference(&self, later: &Self) -> Option<String> {
        let same_values = (&self.values, &self.outputs) == (&later.values, &later.outputs);
        if same_values && runs(self).eq(runs(later)) {
            return None;
        }
        let (mut before, mut now) = (self.nodes(), later.nodes());
        loop {
            match (before.next(), now.next()) {
                (Some(before), Some(now)) if before == now => {}
                (Some(before), Some(now)) => return Some(of_nodes(before, now)),
                (Some(before), None) => return Some(format!("{} is missing", before.path)),
                (None, Some(now)) => return Some(format!("{} is new", now.path)),
                (None, None) => break,
            }
        }
        let mut values = self.values.iter().zip(&later.values);
        let other = values.find(|(before, now)| before != now);
        Some(match other {
            Some((before, now)) => format!(
                "expected a tensor {:?} in {}, got {:?} in {}",
                before.shape,
                before.dtype.as_str(),
                now.shape,
                now.dtype.as_str()
            ),
            None => {
                let events = runs(self).zip(runs(later));
                let alike = events.take_while(|(before, now)| before == now);
                match alike.filter_map(|(_, now)| node(now)).last() {
                    Some(node) => {
                        format!("a checkpoint or the output after {} differs", node.path)
                    }
                    None => "the output differs".into(),
                }
            }
        })
    }
}

fn runs(graph: &Graph) -> impl Iterator<Item = &TraceEvent> {
    let events = graph.events.iter();
    events.filter(|event| !matches!(event, TraceEvent::Drop(_)))
}

fn node(event: &TraceEvent) -> Option<&Node> {
    match event {
        TraceEvent::Node(node) => Some(node),
        _ => None,
    }
}

fn of_nodes(before: &Node, now: &Node) -> String {
    if before.path != now.path {
        return format!("expected {}, got {}", before.path, now.path);
    }
    let attributes = before.attributes.iter().zip(&now.attributes);
    let other = attributes.into_iter().find(|(before, now)| before != now);
    match other {
        Some(((name, before), (_, after))) => {
            format!(
                "expected {name} of {} to be {before}, got {after}",
                now.path
            )
        }
        None => format!("{} reads other tensors, or in another shape", now.path),
    }
}
