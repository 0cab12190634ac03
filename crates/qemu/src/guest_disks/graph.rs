//! QEMU's block nodes, and which is below which.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

/// The nodes by their names.
#[derive(Debug, Default)]
pub(super) struct Graph<'a> {
    nodes: BTreeMap<&'a str, Node<'a>>,
}

/// A block node.
#[derive(Debug, Default)]
pub(super) struct Node<'a> {
    pub(super) name: &'a str,
    pub(super) driver: &'a str,
    /// The image, as QEMU names it: a plain name, or `json:` and a description.
    pub(super) file: &'a str,
    pub(super) bytes: u64,
    pub(super) read_only: bool,
    pub(super) encrypted: bool,
    /// The nodes below, by their roles: `file`, `backing`, `data-file`.
    pub(super) children: BTreeMap<&'a str, &'a str>,
    /// Jobs that work on it.
    pub(super) jobs: BTreeSet<&'a str>,
}

impl<'a> Graph<'a> {
    /// Reads the answers to `query-named-block-nodes` and `x-debug-query-block-graph`.
    pub(super) fn of(nodes: &'a Value, graph: &'a Value) -> Self {
        let named = nodes.as_array().into_iter().flatten().filter_map(Node::of);
        let mut all = Self { nodes: named.map(|node| (node.name, node)).collect() };
        let mut names = BTreeMap::new();
        for one in graph["nodes"].as_array().into_iter().flatten() {
            if let (Some(id), Some(name)) = (one["id"].as_u64(), one["name"].as_str()) {
                names.insert(id, (name, one["type"].as_str().unwrap_or_default()));
            }
        }
        let end = |edge: &Value, which: &str| names.get(&edge[which].as_u64()?).copied();
        for edge in graph["edges"].as_array().into_iter().flatten() {
            let (Some((parent, kind)), Some((child, "block-driver"))) =
                (end(edge, "parent"), end(edge, "child"))
            else {
                continue;
            };
            match kind {
                "block-driver" => {
                    if let (Some(node), Some(role)) =
                        (all.nodes.get_mut(parent), edge["name"].as_str())
                    {
                        node.children.insert(role, child);
                    }
                }
                "block-job" => {
                    if let Some(node) = all.nodes.get_mut(child) {
                        node.jobs.insert(parent);
                    }
                }
                _ => {}
            }
        }
        all
    }

    pub(super) fn node(&self, name: &str) -> Option<&Node<'a>> {
        self.nodes.get(name)
    }

    pub(super) fn child(&self, node: &Node<'a>, role: &str) -> Option<&Node<'a>> {
        self.node(node.children.get(role)?)
    }
}

impl<'a> Node<'a> {
    fn of(one: &'a Value) -> Option<Self> {
        let is_so = |value: &Value| value.as_bool().unwrap_or(false);
        Some(Self {
            name: one["node-name"].as_str()?,
            driver: one["drv"].as_str()?,
            file: one["file"].as_str().unwrap_or_default(),
            bytes: one["image"]["virtual-size"].as_u64().unwrap_or(0),
            read_only: is_so(&one["ro"]),
            encrypted: is_so(&one["encrypted"]) || is_so(&one["image"]["encrypted"]),
            ..Self::default()
        })
    }
}
