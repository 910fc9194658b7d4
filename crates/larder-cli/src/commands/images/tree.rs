//! `larder images --tree`: images as branches of the layers that they share.

use std::collections::BTreeMap;

use larder_api::v1::ImageLayer;

use super::ImageTableRow;
use crate::output::size;
use crate::output::table::TextTable;

/// Layers that are stacked on those of the parent, and the images on top of them.
#[derive(Debug, Default, PartialEq, Eq)]
struct LayerBranch<'a> {
    layers: Vec<u32>,
    images: Vec<&'a ImageTableRow>,
    branches: Vec<LayerBranch<'a>>,
}

/// The tree, one line for each image and for each stack of layers that only other images build on.
pub(super) fn table(rows: &[ImageTableRow], layers: &[ImageLayer]) -> TextTable {
    let mut table = TextTable::new(["IMAGE", "LAYERS", "SIZE", "UNIQUE"]);
    let (known, unknown): (Vec<_>, Vec<_>) = rows.iter().partition(|row| !row.layers.is_empty());
    for branch in branches(known, 0) {
        add(&mut table, &branch, layers, "", "");
    }
    for row in unknown {
        table.row(cells("", row, String::new()));
    }
    table
}

/// Groups images by the layers above this number of common ones.
fn branches(images: Vec<&ImageTableRow>, below: usize) -> Vec<LayerBranch<'_>> {
    let mut groups: BTreeMap<usize, Vec<&ImageTableRow>> = BTreeMap::new();
    let mut first: Vec<u32> = Vec::new();
    for image in images {
        let Some(&layer) = image.layers.get(below) else { continue };
        let group = first.iter().position(|&known| known == layer).unwrap_or_else(|| {
            first.push(layer);
            first.len() - 1
        });
        groups.entry(group).or_default().push(image);
    }
    groups.into_values().map(|group| branch(group, below)).collect()
}

/// Images that have at least one layer above this number in common.
fn branch(group: Vec<&ImageTableRow>, below: usize) -> LayerBranch<'_> {
    let shortest = group.iter().map(|image| image.layers.len()).min().unwrap_or(below);
    let same = |at: &usize| group.iter().all(|image| image.layers[*at] == group[0].layers[*at]);
    let common = (below..shortest).take_while(same).last().map_or(below, |last| last + 1);
    let layers = group[0].layers[below..common].to_vec();
    let (images, above): (Vec<_>, Vec<_>) = group.into_iter().partition(|image| image.layers.len() == common);
    LayerBranch { layers, images, branches: branches(above, common) }
}

fn add(table: &mut TextTable, branch: &LayerBranch<'_>, layers: &[ImageLayer], mark: &str, indent: &str) {
    let count = branch.layers.len();
    let mut names = branch.images.iter();
    if let Some(row) = names.next() {
        table.row(cells(mark, row, count.to_string()));
    } else {
        let bytes = |index: &u32| layers.get(*index as usize).map_or(0, |layer| layer.size_bytes);
        let size = size::bytes(branch.layers.iter().map(bytes).sum());
        let label = format!("{mark}({count} shared {})", if count == 1 { "layer" } else { "layers" });
        table.row([label, count.to_string(), size, String::new()]);
    }
    let others: Vec<_> = names.collect();
    let children = others.len() + branch.branches.len();
    let marks = |number: usize| {
        let is_last = number + 1 == children;
        let (mark, more) =
            if is_last { ("\u{2514}\u{2500} ", "   ") } else { ("\u{251c}\u{2500} ", "\u{2502}  ") };
        (format!("{indent}{mark}"), format!("{indent}{more}"))
    };
    for (number, row) in others.iter().enumerate() {
        table.row(cells(&marks(number).0, row, "0".to_owned()));
    }
    for (number, child) in (others.len()..).zip(&branch.branches) {
        let (mark, indent) = marks(number);
        add(table, child, layers, &mark, &indent);
    }
}

fn cells(mark: &str, row: &ImageTableRow, layers: String) -> [String; 4] {
    let unique = row.unique_bytes.map(size::bytes).unwrap_or_default();
    [format!("{mark}{}", row.name()), layers, size::bytes(row.size_bytes), unique]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_branches_of_shared_layers() {
        let row = |name: &str, layers: &[u32]| ImageTableRow {
            repository: name.to_owned(),
            tag: Some("1".to_owned()),
            size_bytes: 10,
            unique_bytes: Some(5),
            layers: layers.to_vec(),
            ..ImageTableRow::default()
        };
        let layer = ImageLayer { size_bytes: 3, ..ImageLayer::default() };
        let rows = [
            row("app", &[0, 1, 2]),
            row("app-debug", &[0, 1, 2, 3]),
            row("base", &[0]),
            row("same", &[0]),
            row("one", &[7, 8, 4]),
            row("two", &[7, 8, 5]),
            row("unknown", &[]),
        ];
        let text = table(&rows, &vec![layer; 9]).to_string();
        let names: Vec<_> = text.lines().map(|line| line.split("  ").next().unwrap().trim_end()).collect();
        assert_eq!(
            names,
            [
                "IMAGE",
                "base:1",
                "\u{251c}\u{2500} same:1",
                "\u{2514}\u{2500} app:1",
                "", // the indent of app-debug
                "(2 shared layers)",
                "\u{251c}\u{2500} one:1",
                "\u{2514}\u{2500} two:1",
                "unknown:1",
            ]
        );
        assert!(text.contains("   \u{2514}\u{2500} app-debug:1"), "{text}");
        assert!(text.contains("(2 shared layers)        2     6B        -"), "{text}");
    }
}
