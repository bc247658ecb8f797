#[path = "suite/graph.rs"]
mod graph_tests;
