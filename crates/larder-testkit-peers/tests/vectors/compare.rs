//! Whether an answer is the expected one, placeholders considered.

use serde_json::Value;

/// Compares all of `expect` with all of `answer`. In texts, `<TEXT>` stands for any text and `<DURATION>` for any Go
/// duration; `"error": true` means any error text.
pub(crate) fn same(expect: &Value, answer: &Value) -> Result<(), String> {
    differences("", expect, answer).map_or(Ok(()), Err)
}

fn differences(at: &str, expect: &Value, answer: &Value) -> Option<String> {
    match (expect, answer) {
        (Value::Object(expected), Value::Object(answered)) => {
            for (key, value) in expected {
                let at = format!("{at}.{key}");
                match answered.get(key) {
                    None => return Some(format!("{at}: expected {value}, nothing answered")),
                    Some(Value::String(_)) if key == "error" && *value == Value::Bool(true) => {}
                    Some(answer) => {
                        if let Some(difference) = differences(&at, value, answer) {
                            return Some(difference);
                        }
                    }
                }
            }
            let extra = answered.keys().find(|key| !expected.contains_key(*key));
            extra.map(|key| format!("{at}.{key}: answered {}, nothing expected", answered[key]))
        }
        (Value::Array(expected), Value::Array(answered)) if expected.len() == answered.len() => expected
            .iter()
            .zip(answered)
            .enumerate()
            .find_map(|(i, (expected, answered))| differences(&format!("{at}[{i}]"), expected, answered)),
        (Value::String(pattern), Value::String(text)) if matches(pattern, text) => None,
        _ if expect == answer => None,
        _ => Some(format!("{at}: expected {expect}, answered {answer}")),
    }
}

/// Whether `text` is `pattern` with its placeholders filled in.
fn matches(pattern: &str, text: &str) -> bool {
    let next = [("<TEXT>", is_any as fn(&str) -> bool), ("<DURATION>", is_duration)]
        .into_iter()
        .filter_map(|(placeholder, fits)| pattern.find(placeholder).map(|at| (at, placeholder, fits)))
        .min_by_key(|(at, ..)| *at);
    let Some((at, placeholder, fits)) = next else {
        return pattern == text;
    };
    let (before, after) = (&pattern[..at], &pattern[at + placeholder.len()..]);
    text.strip_prefix(before).is_some_and(|rest| {
        rest.char_indices()
            .map(|(i, _)| i)
            .chain([rest.len()])
            .any(|end| fits(&rest[..end]) && matches(after, &rest[end..]))
    })
}

fn is_any(_: &str) -> bool {
    true
}

/// A Go duration: one or more numbers with units.
fn is_duration(text: &str) -> bool {
    let mut rest = text;
    while !rest.is_empty() {
        let digits = rest.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
        let unit = ["ns", "µs", "ms", "s", "m", "h"].into_iter().find_map(|unit| digits.strip_prefix(unit));
        match unit {
            Some(after) if digits.len() < rest.len() => rest = after,
            _ => return false,
        }
    }
    !text.is_empty()
}
