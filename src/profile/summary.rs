//! The summary of ops or kernels, in the style of nsys's kernel summary.

use super::balance::{Balance, LineKind};
use super::floor::DeviceRates;
use super::recording::{self, Recording, Span, extent};
use super::selection::{Grouping, Selection};
use super::tree::Tree;
use crate::ops::cost::Cost;
use crate::probe::{Kind, Parts};
use crate::report::{Column, Fields, Report, Statistics};
use crate::{Error, Result};
use std::collections::HashMap;

/// Time by op, place or kernel, the longest first.
///
/// On a GPU whose kernels were recorded, times are those of the kernels, and rows may be kernels. Elsewhere times are
/// the host's.
///
/// The time and FLOPs of an op are its own, without those of ops inside of it. The ops' rows therefore never count time
/// twice. If a whole phase or everything is selected, the lines of [`Balance`] come after the ops, and all rows
/// together add up to [`whole_ns`](Self::whole_ns). Modules and ranges include everything inside of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProfileReport {
    /// The rows of ops, the longest total first, or with floors the one that loses the most time first; then lines of
    /// time without ops.
    pub rows: Vec<Row>,
    /// The time that shares refer to: the wall time of the selected phase or of all steps. With
    /// [`Selection::within`] it is the time of the ops in that part of the model, or of their kernels with
    /// [`Grouping::Kernel`].
    pub whole_ns: u64,
    /// Number of steps; `None` if none were recorded.
    pub steps: Option<usize>,
}

impl ProfileReport {
    /// Creates the report of what `selection` selects from `recording`.
    ///
    /// # Errors
    /// [`Error::Data`](crate::Error::Data) if nothing in the recording is selected; it lists the recorded phases.
    /// Kernels of a recording without kernels are the same error.
    pub fn new(recording: &Recording, selection: &Selection, grouping: Grouping) -> Result<Self> {
        Self::at_rates(recording, selection, grouping, None)
    }

    /// Creates the same report with the [floor](Row::floor_ns) of each row, the row that loses the most time first.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use tallow::ops;
    /// use tallow::profile::{DeviceRates, Grouping, Profiler, ProfileReport, Selection};
    ///
    /// let device = Device::Cpu;
    /// # let (x, w) = (Tensor::ones((256, 128), DType::F32, &device)?, Tensor::ones((512, 128), DType::F32, &device)?);
    /// let profiler = Profiler::start_on(&device)?;
    /// ops::linear(&x, &w)?;
    /// let recording = profiler.finish()?;
    /// let rates = DeviceRates::measure(&device, &recording.matmul_dtypes())?;
    /// let by_name = Grouping::Name;
    /// let report = ProfileReport::with_floors(&recording, &Selection::default(), by_name, &rates)?;
    /// for row in &report.rows {
    ///     println!("{}: {:?} ns are lost", row.name, row.lost_ns());
    /// }
    /// # assert!(report.rows[0].floor_ns.unwrap() > 0.0);
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`new`](Self::new). [`Grouping::Kernel`] is [`Error::Config`](crate::Error::Config): only ops have
    /// FLOPs and bytes.
    pub fn with_floors(
        recording: &Recording,
        selection: &Selection,
        grouping: Grouping,
        rates: &DeviceRates,
    ) -> Result<Self> {
        if grouping == Grouping::Kernel {
            let got = Error::config("ProfileReport::with_floors", "grouping", "Kernel");
            return Err(got.must_be("Name, Path or Layer", "only ops have FLOPs and bytes"));
        }
        let mut report = Self::at_rates(recording, selection, grouping, Some(rates))?;
        let lost = |row: &Row| row.lost_ns().unwrap_or(0.0);
        let order = |a: &Row, b: &Row| {
            a.is_gap()
                .cmp(&b.is_gap())
                .then(lost(b).total_cmp(&lost(a)))
        };
        report.rows.sort_by(order);
        Ok(report)
    }

    fn at_rates(
        recording: &Recording,
        selection: &Selection,
        grouping: Grouping,
        rates: Option<&DeviceRates>,
    ) -> Result<Self> {
        let tree = Tree::new(recording);
        let (groups, whole_ns) = match grouping {
            Grouping::Kernel => kernels(recording, &tree, selection)?,
            _ => ranges(recording, &tree, selection, grouping, rates),
        };
        let mut report = Self {
            rows: groups.rows()?,
            whole_ns,
            steps: tree.num_steps(),
        };
        if report.rows.is_empty() {
            return Err(selection.nothing(recording));
        }
        report.rows.sort_by(|a, b| {
            let longest_first = b.total_ns.cmp(&a.total_ns);
            longest_first.then_with(|| a.name.cmp(&b.name))
        });
        if selection.within.is_none() {
            report.add_time_without_ops(&Balance::new(recording), selection);
            let gaps = report.rows.iter_mut().filter(|row| row.is_gap());
            gaps.for_each(|gap| gap.floor_ns = rates.map(|_| 0.0));
        }
        Ok(report)
    }

    fn add_time_without_ops(&mut self, balance: &Balance, selection: &Selection) {
        let in_phase = |phase: &str| selection.phase.as_deref().is_none_or(|p| p == phase);
        self.whole_ns = match &selection.phase {
            Some(_) => balance.sum_ns(|line| in_phase(line.phase)),
            None => balance.wall_ns,
        };
        if !selection.kinds.is_empty() {
            return;
        }
        // Kernels that no op launched have rows of their own.
        let by_kernel = self.rows.iter().any(|row| row.launches.is_some());
        let is_row = |kind| kind == LineKind::Ops || by_kernel && kind != LineKind::Idle;
        let lines = balance.lines.iter();
        for line in lines.filter(|l| !is_row(l.kind) && in_phase(l.phase)) {
            self.rows.push(Row {
                name: match line.phase {
                    "" => format!("{}, between phases", line.kind.name()),
                    phase => format!("{}, {phase}", line.kind.name()),
                },
                total_ns: line.total_ns,
                ..Default::default()
            });
        }
    }

    /// Returns a row's share of the whole, in percent.
    pub fn percent(&self, row: &Row) -> f64 {
        100.0 * row.total_ns as f64 / self.whole_ns.max(1) as f64
    }

    /// Returns the number of a row's instances in a step; `None` if no steps were recorded.
    pub fn instances_per_step(&self, row: &Row) -> Option<f64> {
        Some(row.instances as f64 / self.steps? as f64)
    }

    /// Returns milliseconds a step, or in all without steps.
    pub fn ms_per_step(&self, total_ns: u64) -> f64 {
        total_ns as f64 / 1e6 / self.steps.unwrap_or(1) as f64
    }

    /// Returns the sum of the rows for which `wanted` returns true, as one row called `name`. Its cost and its floor
    /// are `None` if one of these rows has none.
    pub fn sum(&self, name: &str, wanted: impl Fn(&Row) -> bool) -> Row {
        let mut sum = Row {
            name: name.into(),
            cost: Some(Cost::default()),
            floor_ns: Some(0.0),
            ..Default::default()
        };
        for row in self.rows.iter().filter(|row| wanted(row)) {
            sum.instances += row.instances;
            sum.total_ns += row.total_ns;
            sum.parts += row.parts;
            sum.cost = sum.cost.zip(row.cost).map(|(sum, cost)| sum + cost);
            sum.floor_ns = sum.floor_ns.zip(row.floor_ns).map(|(sum, ns)| sum + ns);
        }
        sum
    }
}

impl ProfileReport {
    /// Returns the rows as a table with nsys's columns, the instances a step, and the achieved rates; of a report with
    /// [floors](Self::with_floors) as a table of measured time, floor and lost time.
    ///
    /// Mean, Median, Min, Max and Std are of one instance; `total_ms` is the sum over all steps.
    ///
    /// ```
    /// # use tallow::profile::{Grouping, Profiler, ProfileReport, Selection};
    /// # let profiler = Profiler::start()?;
    /// # let x = candle_core::Tensor::ones((2, 3), candle_core::DType::F32, &candle_core::Device::Cpu)?;
    /// # tallow::ops::relu(&x)?;
    /// # let recording = profiler.finish()?;
    /// use tallow::report::Format;
    ///
    /// let summary = ProfileReport::new(&recording, &Selection::default(), Grouping::Name)?;
    /// summary.table().write_to(Format::Markdown, &mut std::io::stdout())?;
    /// # Ok::<(), tallow::Error>(())
    /// ```
    pub fn table(&self) -> Report {
        Report {
            columns: match self.rows.iter().any(|row| row.launches.is_some()) {
                true => Self::kernel_columns(),
                false if self.rows.iter().any(|row| row.floor_ns.is_some()) => {
                    Self::floor_columns()
                }
                false => Self::columns(),
            },
            rows: self.fields(),
            ..Default::default()
        }
    }

    /// Returns the fields of each row, for a table with columns of your own next to those of [`table`](Self::table):
    /// [`columns`](Self::columns), [`kernel_columns`](Self::kernel_columns) or, of a report with floors,
    /// [`floor_columns`](Self::floor_columns).
    pub fn fields(&self) -> Vec<Fields> {
        let rows = self.rows.iter().map(|row| {
            let mut fields = Fields::new();
            let is_op = !row.is_gap();
            fields.insert("time_percent", self.percent(row));
            fields.insert("total_ms", row.total_ns as f64 / 1e6);
            fields.insert("instances", is_op.then_some(row.instances));
            fields.insert(
                "instances_per_step",
                is_op.then(|| self.instances_per_step(row)).flatten(),
            );
            fields.insert("ms_per_step", self.ms_per_step(row.total_ns));
            if let Some(statistics) = &row.statistics {
                fields.merge(statistics.fields());
            }
            fields.insert("product_flops", row.cost.map(|cost| cost.matmul_flops));
            fields.insert("flops", row.cost.map(|cost| cost.flops()));
            fields.insert("flops_per_s", row.flops_per_s());
            fields.insert("bytes", row.cost.map(|cost| cost.bytes()));
            fields.insert("bytes_per_s", row.bytes_per_s());
            if let Some(floor_ns) = row.floor_ns {
                fields.insert("floor_ms_per_step", self.ms_per_step(1) * floor_ns);
                fields.insert(
                    "lost_ms_per_step",
                    row.lost_ns().map(|ns| self.ms_per_step(1) * ns),
                );
                fields.insert("floor_percent", row.floor_percent());
            }
            let part_ms = |ns: u64| is_op.then(|| self.ms_per_step(ns));
            fields.insert("products_ms_per_step", part_ms(row.parts.matmul_ns));
            fields.insert("scores_ms_per_step", part_ms(row.parts.scores_ns));
            fields.insert("values_ms_per_step", part_ms(row.parts.values_ns));
            fields.insert("softmax_ms_per_step", part_ms(row.parts.softmax_ns));
            fields.insert("attention_ms_per_step", part_ms(row.parts.attention_ns));
            match &row.launches {
                None => fields.insert("name", row.label()),
                Some(launches) => {
                    fields.insert("name", row.short_name());
                    fields.insert("kernel", row.name.as_str());
                    fields.insert("grid", launches.grid.map(extent));
                    fields.insert("block", launches.block.map(extent));
                    fields.insert("grids_and_blocks", launches.shapes);
                    fields.insert("ops", Launches::text(&launches.ops, 2));
                    fields.insert("places", Launches::text(&launches.places, usize::MAX - 1))
                }
            };
            fields
        });
        rows.collect()
    }

    /// Returns the columns of [`table`](Self::table) for ops.
    pub fn columns() -> Vec<Column> {
        let rate = |key, title, unit| Column::number(key, title, unit, 1).scaled(1e9);
        vec![
            Column::text("name", "Op"),
            Column::number("time_percent", "Time", "%", 1),
            Column::number("instances_per_step", "A step", "", 1),
            Column::ms("mean_ms", "Mean"),
            Column::ms("std_ms", "Std"),
            Column::ms("products_ms_per_step", "Matmuls a step"),
            Column::ms("softmax_ms_per_step", "Softmax a step"),
            rate("flops_per_s", "Rate", "GFLOP/s"),
            rate("bytes_per_s", "Memory", "GB/s"),
            Column::ms("total_ms", "Total"),
            Column::count("instances", "Instances"),
            Column::ms("median_ms", "Median"),
            Column::ms("min_ms", "Min"),
            Column::ms("max_ms", "Max"),
        ]
    }

    /// Returns the columns of a table with [floors](Self::with_floors).
    pub fn floor_columns() -> Vec<Column> {
        let mut columns = vec![
            Column::text("name", "Op"),
            Column::number("instances_per_step", "A step", "", 1),
            Column::ms("ms_per_step", "Measured"),
            Column::ms("floor_ms_per_step", "Floor"),
            Column::ms("lost_ms_per_step", "Lost"),
            Column::number("floor_percent", "Floor of measured", "%", 1),
        ];
        let is_rate = |column: &Column| column.key.ends_with("_per_s");
        columns.extend(Self::columns().into_iter().filter(is_rate));
        columns
    }

    /// Returns the columns of [`table`](Self::table) for kernels: nsys's columns, with grid, block and the ops that
    /// launched them.
    pub fn kernel_columns() -> Vec<Column> {
        let unknown = "flops_per_s bytes_per_s products_ms_per_step softmax_ms_per_step";
        let mut columns = Self::columns();
        columns.retain(|column| !unknown.split(' ').any(|key| key == column.key));
        columns[0].title = "Kernel".into();
        columns.extend([
            Column::text("grid", "Grid"),
            Column::text("block", "Block"),
            Column::text("ops", "Launched by"),
            Column::text("places", "Places"),
        ]);
        columns
    }
}

/// One row: the ranges of one name or path, or the kernels of one name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row {
    /// The name or path.
    pub name: String,
    /// The kind of range; `None` for kernels, and for a line of time without ops.
    pub kind: Option<Kind>,
    /// Number of instances, over all steps.
    pub instances: usize,
    /// Their time, over all steps.
    pub total_ns: u64,
    /// Statistics of their times; `None` for a line of time without ops.
    pub statistics: Option<Statistics>,
    /// Their FLOPs and bytes, over all steps; `None` if one of them has no formula.
    pub cost: Option<Cost>,
    /// The least time of their FLOPs and bytes at the [rates](DeviceRates) of
    /// [`with_floors`](ProfileReport::with_floors), the sum over all instances; 0 for a line of time without ops.
    /// `None` without rates, or if an instance has no formula.
    pub floor_ns: Option<f64>,
    /// Time of matmuls and of softmax; 0 if the ops' kernels did not report it.
    pub parts: Parts,
    /// Work that these ops do in their own kernel and that is elsewhere an op of its own, such as the gate of SwiGLU.
    pub inside: Option<&'static str>,
    /// For kernels: how they were launched.
    pub launches: Option<Launches>,
}

impl Row {
    /// Returns the name, with the description of what is inside.
    pub fn label(&self) -> String {
        match self.inside {
            Some(inside) => format!("{} ({inside} inside)", self.name),
            None => self.name.clone(),
        }
    }

    /// Returns a kernel's name without namespaces, and without template arguments except the one that describes
    /// CUTLASS's matmul. Other names are unchanged.
    pub fn short_name(&self) -> &str {
        match self.launches {
            Some(_) => recording::short(&self.name),
            None => &self.name,
        }
    }

    /// Returns whether it is a line of time without ops or kernels.
    pub fn is_gap(&self) -> bool {
        self.instances == 0
    }

    /// Returns its time without matmuls and softmax.
    pub fn rest_ns(&self) -> u64 {
        self.total_ns.saturating_sub(self.parts.sum_ns())
    }

    /// Returns the time above the floor; below 0 if the instances were faster than their floor.
    pub fn lost_ns(&self) -> Option<f64> {
        Some(self.total_ns as f64 - self.floor_ns?)
    }

    /// Returns the floor in percent of the measured time.
    pub fn floor_percent(&self) -> Option<f64> {
        Some(100.0 * self.floor_ns? / self.total_ns.max(1) as f64)
    }

    /// Returns FLOP/s, if FLOPs are known and not 0.
    pub fn flops_per_s(&self) -> Option<f64> {
        self.rate(self.cost?.flops())
    }

    /// Returns bytes/s by the formula's bytes.
    pub fn bytes_per_s(&self) -> Option<f64> {
        self.rate(self.cost?.bytes())
    }

    fn rate(&self, amount: f64) -> Option<f64> {
        (amount > 0.0 && self.total_ns > 0).then(|| amount / (self.total_ns as f64 / 1e9))
    }

    /// Returns whether it has a matmul, whatever else is inside.
    pub fn is_matmul(&self) -> bool {
        self.cost.is_some_and(|cost| cost.matmul_flops > 0.0)
    }
}

/// How the kernels of a row were launched.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Launches {
    /// The most frequent grid; `None` for memory work.
    pub grid: Option<[u32; 3]>,
    /// The most frequent block.
    pub block: Option<[u32; 3]>,
    /// Number of different pairs of grid and block.
    pub shapes: usize,
    /// The ops that launched them with the number of launches, the most frequent first; `candle` outside of this
    /// crate's ops.
    pub ops: Vec<(String, usize)>,
    /// The places that launched them, likewise, with all blocks of the model together
    /// ([`Grouping::Layer`](super::Grouping::Layer)).
    pub places: Vec<(String, usize)>,
}

impl Launches {
    /// Joins the first `most` names: `linear, swiglu_linear and 2 more`.
    pub(super) fn text(counts: &[(String, usize)], most: usize) -> String {
        let names: Vec<&str> = counts.iter().map(|(name, _)| name.as_str()).collect();
        match names.len().checked_sub(most + 1) {
            None => names.join(", "),
            Some(beyond) => format!("{} and {} more", names[..most].join(", "), beyond + 1),
        }
    }
}

/// Returns the cost of each op without the FLOPs of ops inside of it. Bytes are not subtracted: a tensor passed from
/// one op to another is written by one and read by the other.
fn own_costs(recording: &Recording, tree: &Tree<'_>) -> Vec<Option<Cost>> {
    let costs: Vec<Option<Cost>> = recording.spans.iter().map(Span::cost).collect();
    let mut own = costs.clone();
    for (inner, node) in costs.iter().zip(&tree.nodes) {
        let owners = node.owner.and_then(|owner| own[owner].as_mut());
        if let (Some(owners), Some(inner)) = (owners, inner) {
            owners.matmul_flops = (owners.matmul_flops - inner.matmul_flops).max(0.0);
            owners.other_flops = (owners.other_flops - inner.other_flops).max(0.0);
            let softmax_flops = (owners.softmax_flops - inner.softmax_flops).max(0.0);
            owners.softmax_flops = softmax_flops.min(owners.other_flops);
        }
    }
    own
}

/// Groups the selected ranges, and returns the time of the ops among them.
fn ranges(
    recording: &Recording,
    tree: &Tree<'_>,
    selection: &Selection,
    grouping: Grouping,
    rates: Option<&DeviceRates>,
) -> (Groups, u64) {
    let own_costs = own_costs(recording, tree);
    let (mut groups, mut ops_ns) = (Groups::default(), 0);
    for (i, span) in recording.spans.iter().enumerate() {
        if !tree.counts(i) || !selection.selects_place(span) {
            continue;
        }
        let ns = match span.is_op() {
            true => tree.nodes[i].own_ns,
            false => tree.nodes[i].whole_ns,
        };
        if span.is_op() {
            ops_ns += ns;
        }
        if selection.selects_kind(span.kind) {
            let group = groups.add(grouping.name_of(span), Some(span.kind), ns);
            group.row.parts += tree.nodes[i].parts;
            group.row.cost = group
                .row
                .cost
                .zip(own_costs[i])
                .map(|(sum, cost)| sum + cost);
            if let Some(rates) = rates {
                let floor_ns = own_costs[i].and_then(|mut cost| {
                    if tree.nodes[i].holds_ops {
                        (cost.read_bytes, cost.written_bytes) = (0.0, 0.0); // the ops inside move them
                    }
                    Some(1e9 * rates.floor_seconds(&cost, span.compute_dtype())?)
                });
                group.row.floor_ns = match group.row.instances {
                    1 => floor_ns,
                    _ => group.row.floor_ns.zip(floor_ns).map(|(sum, ns)| sum + ns),
                };
            }
            // If the parts are ops with ranges of their own, they are not inside.
            if span.is_op() && !tree.nodes[i].holds_ops {
                group.row.inside = recording::entry(&span.name()).and_then(|entry| entry.includes);
            }
        }
    }
    (groups, ops_ns)
}

/// Groups the kernels that the selected ranges launched, and returns their time.
fn kernels(recording: &Recording, tree: &Tree<'_>, selection: &Selection) -> Result<(Groups, u64)> {
    if recording.kernels.is_empty() {
        return Err(
            Error::data("profile report", "a recording without any").must_be(
                "kernels",
                "record a GPU of NVIDIA's with Profiler::start_on; on the CPU group ops by name or \
             place",
            ),
        );
    }
    let (mut groups, mut sum_ns) = (Groups::default(), 0);
    for kernel in &recording.kernels {
        let Some(at) = kernel.span.filter(|at| tree.counts(*at)) else {
            continue;
        };
        let span = &recording.spans[tree.op_or_itself(at)];
        if !selection.selects_place(span) {
            continue;
        }
        let launcher = |grouping: Grouping| match span.is_op() {
            true => grouping.name_of(span),
            false if span.phase.is_empty() => "candle".into(),
            false => format!("candle in {}", span.phase),
        };
        sum_ns += kernel.duration_ns();
        let group = groups.add(kernel.name.to_string(), None, kernel.duration_ns());
        group.row.parts += kernel.parts();
        count(&mut group.shapes, (kernel.grid, kernel.block));
        let launches = group.row.launches.get_or_insert_default();
        count(&mut launches.ops, launcher(Grouping::Name));
        count(&mut launches.places, launcher(Grouping::Layer));
    }
    Ok((groups, sum_ns))
}

#[derive(Default)]
struct Groups {
    numbers: HashMap<(String, Option<Kind>), usize>,
    groups: Vec<Group>,
}

type Extent = Option<[u32; 3]>;

struct Group {
    row: Row,
    samples_ns: Vec<u64>,
    /// Grids and blocks of kernels, with the number of launches.
    shapes: Vec<((Extent, Extent), usize)>,
}

impl Groups {
    /// Adds a range of this name and kind, or a kernel, to its group.
    fn add(&mut self, name: String, kind: Option<Kind>, ns: u64) -> &mut Group {
        let number = *self.numbers.entry((name.clone(), kind)).or_insert_with(|| {
            let cost = kind.map(|_| Cost::default());
            self.groups.push(Group {
                row: Row {
                    name,
                    kind,
                    cost,
                    ..Default::default()
                },
                samples_ns: Vec::new(),
                shapes: Vec::new(),
            });
            self.groups.len() - 1
        });
        let group = &mut self.groups[number];
        group.samples_ns.push(ns);
        group.row.instances += 1;
        group.row.total_ns += ns;
        group
    }

    fn rows(self) -> Result<Vec<Row>> {
        let rows = self.groups.into_iter().map(|mut group| {
            let samples_ms: Vec<f64> = group.samples_ns.iter().map(|&ns| ns as f64 / 1e6).collect();
            group.row.statistics = Some(Statistics::new(&samples_ms)?);
            if let Some(launches) = &mut group.row.launches {
                sort_most_frequent_first(&mut group.shapes);
                sort_most_frequent_first(&mut launches.ops);
                sort_most_frequent_first(&mut launches.places);
                (launches.grid, launches.block) = group.shapes[0].0;
                launches.shapes = group.shapes.len();
            }
            Ok(group.row)
        });
        rows.collect()
    }
}

fn count<T: PartialEq>(counts: &mut Vec<(T, usize)>, item: T) {
    match counts.iter_mut().find(|(known, _)| *known == item) {
        Some((_, count)) => *count += 1,
        None => counts.push((item, 1)),
    }
}

fn sort_most_frequent_first<T: Ord>(counts: &mut [(T, usize)]) {
    counts.sort_by(|(a, m), (b, n)| n.cmp(m).then_with(|| a.cmp(b)));
}
