//! Sorts the names of a directory in bounded memory: names may be in a file, and a directory may have all of them.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

use crate::tree::{NameTree, NodeId};

/// Bytes of names and of their places that are in memory at a time.
const RUN: usize = 1 << 20;

/// Sorts nodes by name.
pub(super) struct NameSorter<'a> {
    tree: &'a NameTree,
    run: usize,
    /// Names of a run, and where the name of each node is.
    names: Vec<u8>,
    keys: Vec<(Range<usize>, NodeId)>,
}

impl<'a> NameSorter<'a> {
    pub(super) fn new(tree: &'a NameTree) -> NameSorter<'a> {
        NameSorter { tree, run: RUN, names: Vec::new(), keys: Vec::new() }
    }

    /// Sorts runs whose names fit into memory, and merges them.
    pub(super) fn sort(&mut self, nodes: &mut [NodeId]) {
        let mut runs = Vec::new();
        let mut start = 0;
        while start < nodes.len() {
            let length = self.sort_run(&mut nodes[start..]);
            runs.push(start..start + length);
            start += length;
        }
        if runs.len() > 1 {
            self.merge(nodes, runs);
        }
    }

    /// Sorts the first nodes, and returns how many.
    fn sort_run(&mut self, nodes: &mut [NodeId]) -> usize {
        self.names.clear();
        self.keys.clear();
        for node in nodes.iter() {
            if self.names.len() + self.keys.len() * size_of::<(Range<usize>, NodeId)>() >= self.run {
                break;
            }
            let start = self.names.len();
            self.names.extend_from_slice(&self.tree.name(self.tree.node(*node)));
            self.keys.push((start..self.names.len(), *node));
        }
        let names = &self.names;
        self.keys.sort_unstable_by(|(one, _), (other, _)| names[one.clone()].cmp(&names[other.clone()]));
        for (node, (_, sorted)) in nodes.iter_mut().zip(&self.keys) {
            *node = *sorted;
        }
        self.keys.len()
    }

    fn merge(&self, nodes: &mut [NodeId], runs: Vec<Range<usize>>) {
        let mut merged = Vec::with_capacity(nodes.len());
        let mut heap = BinaryHeap::new();
        let next = |mut run: Range<usize>| {
            let node = nodes[run.next()?];
            Some(Reverse((self.tree.name(self.tree.node(node)).into_owned(), node, run.start, run.end)))
        };
        heap.extend(runs.into_iter().filter_map(next));
        while let Some(Reverse((_, node, start, end))) = heap.pop() {
            merged.push(node);
            heap.extend(next(start..end));
        }
        nodes.copy_from_slice(&merged);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::{NodeKind, ROOT};

    #[test]
    fn runs_are_merged() {
        let mut tree = NameTree::new(Box::new(Vec::new()), Box::new(Vec::new()));
        let names: Vec<_> = (0..5000u32).map(|at| at.wrapping_mul(2_654_435_761).to_string()).collect();
        let nodes = names.iter().map(|name| tree.put(ROOT, name.as_bytes(), NodeKind::File, 0, b""));
        let mut nodes: Vec<NodeId> = nodes.collect();
        tree.spill_names().unwrap();
        let mut sorter = NameSorter { run: 1000, ..NameSorter::new(&tree) };
        sorter.sort(&mut nodes);
        let mut expected = names;
        expected.sort();
        let found: Vec<_> = nodes.iter().map(|node| tree.name(tree.node(*node)).into_owned()).collect();
        assert!(found.iter().eq(expected.iter().map(String::as_bytes)));
    }
}
