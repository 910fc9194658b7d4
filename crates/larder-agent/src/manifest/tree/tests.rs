//! Documents that are sound, broken, and meant to do harm.

use super::super::problem::InputPlace;
use super::*;

/// Reads one document, as [`parse_all`] does.
pub(in crate::manifest) fn parse(text: &str) -> Result<YamlNode, InputProblem> {
    parse_all(&[text]).remove(0)
}

#[test]
fn fields_know_their_path_and_line() {
    let node = parse("a:\n  b:\n    - c: 1.25\n").unwrap();
    let c = NodeCursor::root(&node).descend(&["a", "b"]).unwrap().unwrap().items().unwrap()[0].field("c");
    let problem = c.unwrap().unwrap().text().expect_err("a number is not a string");
    let located = InputPlace { document: 1, ..InputPlace::file("f") }.locate(problem);
    assert_eq!(located.to_string(), "f:3: document 1: a.b[0].c: must be a string, is the number 1.25");
}

#[test]
fn json_is_read_even_where_yaml_would_not() {
    let node = parse("{\n\t\"a\": \"\\ud83d\\ude00\\/\"\n}").unwrap();
    assert_eq!(NodeCursor::root(&node).text_of("a"), Ok(Some("😀/")));
}

#[test]
fn broken_yaml_is_reported_with_its_line_and_without_its_content() {
    let problem = parse("data:\n  password: [hunter2\n").expect_err("the list has no end");
    let located = InputPlace { document: 1, ..InputPlace::file("f") }.locate(problem).to_string();
    assert!(located.starts_with("f:2: ") || located.starts_with("f:3: "), "{located}");
    assert!(!located.contains("hunter2"), "{located}");
}

#[test]
fn a_repeated_key_is_an_error() {
    for text in [
        "a: 1\nhunter2: 2\nhunter2: 3\n",
        "{\"hunter2\": 1, \"hunter2\": 2}",
        "{\t\"hunter2\": 1, \"hunter2\": 2}",
    ] {
        let problem = parse(text).expect_err(text).to_string();
        assert!(!problem.contains("hunter2"), "{problem}");
    }
    assert_eq!(
        parse("a: 1\na: 2\n").expect_err("twice").to_string(),
        format!("not valid YAML: {REPEATED_KEY}")
    );
}

#[test]
fn no_error_of_the_reader_shows_what_is_there() {
    for text in [
        "a: *hunter2",
        "a: !hunter2 x",
        "a: !hunter2!x y",
        "a: !!int hunter2",
        "a: !!binary hunter2!",
        "a: !!float hunter2",
        "a: !!bool hunter2",
        "a: !!null hunter2",
        "a: !!timestamp hunter2",
        "a: !!map hunter2",
        "<<: hunter2",
        "{a: [hunter2}",
        "a: 'hunter2",
        "a: \"hunter2\\q\"",
        "a: @hunter2",
        "a: `hunter2`",
        "%hunter2\na: 1",
        "[hunter2]: 1",
        "{hunter2: 1}: 1",
        "a: hunter2\n b: 1",
        "a: hunter2\n\tb: 1",
        "a: |hunter2",
        "a: 1\n--- hunter2\n",
        "a: 1\n...\nhunter2",
        "? hunter2\n? hunter2\n",
        "a: &hunter2 1\nb: *hunter3",
    ] {
        let shown = parse(text).map_or_else(|problem| format!("{problem:?}"), |_| String::new());
        assert!(!shown.contains("hunter") && !shown.contains(['@', '`']), "{text}: {shown}");
    }
}

#[test]
fn expanding_aliases_without_bound_is_refused() {
    let mut text = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for level in 1..9 {
        let below = level - 1;
        let refs = vec![format!("*a{below}"); 10].join(", ");
        text = format!("{text}a{level}: &a{level} [{refs}]\n");
    }
    assert!(parse(&text).is_err());
}

#[test]
fn deep_nesting_is_refused() {
    for nested in ["[", "{a: ", "- ", "? "] {
        assert!(parse(&nested.repeat(10_000)).is_err(), "{nested}");
    }
    assert!(parse(&format!("{}1", "- ".repeat(100))).is_ok(), "but some depth is fine");
}

#[test]
fn aliases_add_no_depth_beyond_the_bound() {
    let chain = |levels: usize| {
        let links = (1..levels).map(|level| format!("a{level}: &a{level} [*a{}]\n", level - 1));
        format!("a0: &a0 [x]\n{}", links.collect::<String>())
    };
    assert!(parse(&chain(20)).is_ok());
    for levels in [200, 5_000] {
        assert!(parse(&chain(levels)).is_err(), "{levels}");
    }
    // Each anchor nests as deep as is allowed and holds the one before it.
    let nested = |level: usize| {
        let inner = if level == 0 { "x".to_owned() } else { format!("*b{}", level - 1) };
        format!("b{level}: &b{level} {}{inner}{}\n", "[".repeat(100), "]".repeat(100))
    };
    assert!(parse(&(0..60).map(nested).collect::<String>()).is_err());
}
