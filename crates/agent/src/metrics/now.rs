//! Metrics of the present state: VMs, running migrations, buffers.

use api::{Progress, VmStatus, VmSummary};
use engine::Buffers;
use prometheus::core::Collector;
use prometheus::proto::MetricFamily;
use prometheus::{GaugeVec, Opts, Registry};

use super::{FIXED, label};

/// Each status always has its series, so that an alert can be set before it first occurs.
const STATUSES: [VmStatus; 6] = [
    VmStatus::Running,
    VmStatus::Paused,
    VmStatus::Arriving,
    VmStatus::InDoubt,
    VmStatus::Unreadable,
    VmStatus::Dead,
];

/// The present state of an agent.
pub(crate) struct Now {
    pub(crate) vms: Vec<VmSummary>,
    /// Running migrations of VMs.
    pub(crate) migrations: Vec<Progress>,
    /// Outgoing and incoming.
    pub(crate) buffers: [Buffers; 2],
    /// When its certificate expires, in seconds since 1970.
    pub(crate) certificate_until_s: Option<i64>,
}

impl Now {
    pub(super) fn gather(&self) -> Vec<MetricFamily> {
        let registry = Registry::new();
        let gauge = |name, help, labels: &[&str]| {
            let gauge = GaugeVec::new(Opts::new(name, help), labels).expect(FIXED);
            registry.register(Box::new(gauge.clone())).expect(FIXED);
            gauge
        };
        gauge("droveway_build_info", "The agent's version", &["version"])
            .with_label_values(&[env!("CARGO_PKG_VERSION")])
            .set(1.0);
        let vms = gauge("droveway_vms", "VMs of this host, by state", &["status"]);
        for status in STATUSES {
            let number = self.vms.iter().filter(|vm| vm.status == status).count();
            vms.with_label_values(&[&label(&status)]).set(number as f64);
        }
        let replaced = self.vms.iter().filter(|vm| vm.program_replaced).count();
        gauge(
            "droveway_vms_program_replaced",
            "VMs of this host whose QEMU's program was replaced on disk since it started",
            &[],
        )
        .with_label_values::<&str>(&[])
        .set(replaced as f64);
        let total = gauge("droveway_buffers_bytes", "Buffers of all migrations", &["direction"]);
        let used = gauge("droveway_buffers_used_bytes", "Buffers that hold data", &["direction"]);
        for (direction, buffers) in ["outgoing", "incoming"].iter().zip(self.buffers) {
            total.with_label_values(&[direction]).set(buffers.bytes as f64);
            used.with_label_values(&[direction]).set(buffers.used_bytes as f64);
        }
        if let Some(until_s) = self.certificate_until_s {
            gauge(
                "droveway_certificate_expiry_timestamp_seconds",
                "When this host's certificate ends, in seconds since 1970",
                &[],
            )
            .with_label_values::<&str>(&[])
            .set(until_s as f64);
        }
        let running = gauge("droveway_migrations_running", "Migrations from this host", &[]);
        running.with_label_values::<&str>(&[]).set(self.migrations.len() as f64);
        self.each_migration(&registry);
        registry.gather()
    }

    fn each_migration(&self, registry: &Registry) {
        type Figure = fn(&Progress) -> Option<f64>;
        let figures: [(&str, &str, Figure); 7] = [
            ("left_bytes", "Guest memory that the destination doesn't have", |it| {
                Some(it.left_bytes as f64)
            }),
            ("disk_left_bytes", "What of its disks isn't mirrored", |it| {
                Some(it.disk_left_bytes as f64)
            }),
            ("delivered_bytes_per_second", "Guest memory that arrives", |it| {
                Some(it.delivered_bytes_per_s)
            }),
            ("lane_bytes_per_second", "Bytes written to its lanes", |it| Some(it.wire_bytes_per_s)),
            (
                "dirty_bytes_per_second",
                "Guest memory that it changes, as QEMU reports after its first pass",
                Progress::dirties,
            ),
            (
                "cpu_share",
                "The share of its CPU time that it keeps: 1 if it isn't throttled",
                |it| Some(it.share),
            ),
            ("pass", "QEMU's passes over its memory", |it| Some(it.pass.into())),
        ];
        for (name, help, figure) in figures {
            let help = format!("Of a VM that moves: {help}");
            let options = Opts::new(format!("droveway_migration_{name}"), help);
            let gauge = GaugeVec::new(options, &["vm", "to"]).expect(FIXED);
            for one in &self.migrations {
                if let Some(figure) = figure(one) {
                    gauge.with_label_values(&[&one.vm, &one.to]).set(figure);
                }
            }
            // Without a moving VM the series would be empty.
            if gauge.collect().iter().any(|family| !family.get_metric().is_empty()) {
                registry.register(Box::new(gauge)).expect(FIXED);
            }
        }
    }
}
