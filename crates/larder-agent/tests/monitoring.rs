//! The alert rules and the dashboard use metrics and labels that larder exports, and each alert has its tests.

#![allow(clippy::unwrap_used, reason = "a file that cannot be read has failed")]

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

/// Labels that Prometheus adds, and those of rules and histograms.
const SCRAPED_LABELS: [&str; 3] = ["job", "instance", "le"];

fn read(path: &str) -> String {
    let path = format!("{}/../../{path}", env!("CARGO_MANIFEST_DIR"));
    fs_err::read_to_string(path).unwrap()
}

fn yaml(path: &str) -> Value {
    serde_saphyr::from_str(&read(path)).unwrap()
}

/// The exported metrics with their labels, as documented: other tests compare the documentation with what is served.
fn exported() -> BTreeMap<String, BTreeSet<String>> {
    let page = read("docs/metrics.md");
    let mut metrics = BTreeMap::new();
    for row in page.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let word = |cell: &str| cell.trim_matches('`').to_owned();
        let labels: BTreeSet<String> =
            cells[3].split(", ").filter(|label| !label.is_empty()).map(word).collect();
        let suffixes: &[&str] = if cells[2] == "histogram" { &["_bucket", "_count", "_sum"] } else { &[""] };
        for suffix in suffixes {
            metrics.insert(format!("{}{suffix}", word(cells[1])), labels.clone());
        }
    }
    assert!(metrics.len() > 50, "{metrics:?}");
    metrics
}

/// The names of metrics in an expression. Under kubelet's name, a metric is the same.
fn metrics_in(expression: &str) -> BTreeSet<String> {
    let plain = expression.replace("kubelet_", "larder_");
    let words = plain.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    let is_metric = |word: &&str| word.starts_with("larder_") || word.starts_with("process_");
    words.filter(is_metric).map(str::to_owned).collect()
}

/// The labels that an expression selects or groups by.
fn labels_in(expression: &str) -> BTreeSet<String> {
    let selectors = expression.split('{').skip(1).filter_map(|rest| rest.split('}').next());
    let selected =
        selectors.flat_map(|selector| selector.split("\",").map(|one| one.split(['=', '!']).next()));
    let groups = expression.split("by (").skip(1).filter_map(|rest| rest.split(')').next());
    let grouped = groups.flat_map(|group| group.split(',').map(Some));
    let names = selected.chain(grouped).flatten().map(|name| name.trim().to_owned());
    names.filter(|name| !name.is_empty()).collect()
}

/// Fails if an expression names a metric that is not exported or a label that none of its metrics has, or if it selects
/// metrics of a kubelet.
fn assert_exported(place: &str, expression: &str, exported: &BTreeMap<String, BTreeSet<String>>) {
    let mut known: BTreeSet<&str> = SCRAPED_LABELS.into();
    for metric in metrics_in(expression) {
        let labels =
            exported.get(&metric).unwrap_or_else(|| panic!("{place}: larder does not export {metric}"));
        known.extend(labels.iter().map(String::as_str));
    }
    for label in labels_in(expression) {
        assert!(known.contains(label.as_str()), "{place}: no metric of {expression} has the label {label}");
    }
    for selector in expression.split("kubelet_").skip(1) {
        let labels = selector.split_once('{').and_then(|(_, rest)| rest.split_once('}'));
        let is_larders = labels.is_some_and(|(labels, _)| labels.contains("job=\"larder\""));
        assert!(is_larders, "{place}: without job=\"larder\", kubelet_{selector} is kubelet's, too");
    }
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_else(|| panic!("{key} is missing: {value}"))
}

/// All alert rules.
fn rules() -> Vec<Value> {
    let groups = yaml("packaging/prometheus/larder_rules.yml");
    let groups = groups["groups"].as_array().unwrap().clone();
    groups.iter().flat_map(|group| group["rules"].as_array().unwrap().clone()).collect()
}

/// The anchor of a heading.
fn anchor(heading: &str) -> String {
    heading.trim_start_matches('#').trim().to_lowercase().replace(' ', "-")
}

#[test]
fn each_alert_has_a_test_that_fires_and_one_that_does_not() {
    let tests = yaml("packaging/prometheus/larder_rules_test.yml");
    let mut outcomes: BTreeMap<String, BTreeSet<bool>> = BTreeMap::new();
    for test in tests["tests"].as_array().unwrap() {
        for case in test["alert_rule_test"].as_array().unwrap() {
            let fires = !case["exp_alerts"].as_array().unwrap().is_empty();
            outcomes.entry(text(case, "alertname").to_owned()).or_default().insert(fires);
        }
    }
    let rules = rules();
    for rule in &rules {
        let name = text(rule, "alert");
        assert_eq!(
            outcomes.remove(name),
            Some([false, true].into()),
            "tests of {name}: one fires, one does not"
        );
    }
    assert!(outcomes.is_empty(), "tests of alerts that do not exist: {outcomes:?}");
}

#[test]
fn each_alert_names_exported_metrics_the_next_step_and_its_section() {
    let (exported, page) = (exported(), read("docs/troubleshooting.md"));
    let sections: BTreeSet<String> = page.lines().filter(|line| line.starts_with('#')).map(anchor).collect();
    let monitoring = read("docs/monitoring.md");
    for rule in rules() {
        let (name, annotations) = (text(&rule, "alert"), &rule["annotations"]);
        assert_exported(name, text(&rule, "expr"), &exported);
        assert!(!text(annotations, "summary").is_empty(), "{name}");
        assert!(text(annotations, "description").contains("Next: "), "{name}");
        let section = text(annotations, "runbook").strip_prefix("docs/troubleshooting.md#").unwrap();
        assert!(sections.contains(section), "{name}: docs/troubleshooting.md has no section {section}");
        assert!(["critical", "warning"].contains(&text(&rule["labels"], "severity")), "{name}");
        assert!(monitoring.contains(&format!("`{name}`")), "docs/monitoring.md does not list {name}");
    }
}

#[test]
fn the_dashboard_shows_exported_metrics() {
    let (exported, dashboard) = (exported(), read("packaging/grafana/larder.json"));
    let dashboard: Value = serde_json::from_str(&dashboard).unwrap();
    for annotation in dashboard["annotations"]["list"].as_array().unwrap() {
        let Some(expression) = annotation["expr"].as_str() else { continue };
        assert!(!metrics_in(expression).is_empty(), "{annotation}");
        assert_exported(text(annotation, "name"), expression, &exported);
    }
    let (mut ids, mut expressions) = (BTreeSet::new(), 0);
    for panel in dashboard["panels"].as_array().unwrap() {
        let title = text(panel, "title");
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{title}: the id is used twice");
        let place = &panel["gridPos"];
        assert!(place["x"].as_u64().unwrap() + place["w"].as_u64().unwrap() <= 24, "{title} is too wide");
        let Some(targets) = panel["targets"].as_array() else { continue };
        assert_eq!(text(&panel["datasource"], "uid"), "${datasource}", "{title}");
        for target in targets {
            let expression = text(target, "expr").replace("$node", "x").replace("$__rate_interval", "5m");
            assert!(!metrics_in(&expression).is_empty(), "{title}: {expression}");
            assert_exported(title, &expression, &exported);
            expressions += 1;
        }
    }
    assert!(expressions > 30, "{expressions}");
    let variables = dashboard["templating"]["list"].as_array().unwrap();
    let names: Vec<&str> = variables.iter().map(|variable| text(variable, "name")).collect();
    assert_eq!(names, ["datasource", "node"]);
    assert_exported("node", text(&variables[1], "definition"), &exported);
}

#[test]
#[should_panic(expected = "larder does not export larder_pulls_total")]
fn a_metric_that_is_not_exported_is_found() {
    assert_exported("", "rate(larder_pulls_total[5m]) > 1", &exported());
}

#[test]
#[should_panic(expected = "has the label registry")]
fn a_label_that_no_metric_has_is_found() {
    assert_exported("", "sum by (registry) (larder_pulls{job=\"larder\"})", &exported());
}

#[test]
#[should_panic(expected = "is kubelet's, too")]
fn a_metric_of_a_kubelet_is_found() {
    assert_exported("", "sum(rate(kubelet_runtime_operations_total[5m])) by (job)", &exported());
}
