//! The lines in which two texts differ. Pure.

/// How many unchanged lines are shown around a change.
const CONTEXT: usize = 2;

/// The changed lines with some around them, as `diff -u` prints them; empty if the texts are the same.
pub(super) fn lines(old: &str, new: &str) -> Vec<String> {
    let (old, new): (Vec<&str>, Vec<&str>) = (old.lines().collect(), new.lines().collect());
    let script = script(&old, &new);
    let is_near = |at: usize| {
        let around = at.saturating_sub(CONTEXT)..(at + CONTEXT + 1).min(script.len());
        script[around].iter().any(|(mark, _)| *mark != ' ')
    };
    let mut shown = Vec::new();
    let mut last = None;
    for (at, (mark, line)) in script.iter().enumerate().filter(|(at, _)| is_near(*at)) {
        if last.is_some_and(|last| last + 1 != at) || (last.is_none() && at > 0) {
            shown.push("@@".to_owned());
        }
        last = Some(at);
        shown.push(format!("{mark}{line}").trim_end().to_owned());
    }
    shown
}

/// All lines of both, each with ` `, `-` or `+`.
fn script<'a>(old: &[&'a str], new: &[&'a str]) -> Vec<(char, &'a str)> {
    fn is_same((old, new): &(&&str, &&str)) -> bool {
        old == new
    }
    let first = old.iter().zip(new).take_while(is_same).count();
    let (before, old) = old.split_at(first);
    let new = &new[first..];
    let last = old.iter().rev().zip(new.iter().rev()).take_while(is_same).count();
    let (old, after) = old.split_at(old.len() - last);
    let changed = changes(old, &new[..new.len() - last]);
    let same = |line: &&'a str| (' ', *line);
    before.iter().map(same).chain(changed).chain(after.iter().map(same)).collect()
}

/// Compares the lines between the common beginning and end; takes memory for each pair of lines.
fn changes<'a>(old: &[&'a str], new: &[&'a str]) -> Vec<(char, &'a str)> {
    // The length of the longest common subsequence of the rests that begin at each pair of lines.
    let mut common = vec![vec![0_u32; new.len() + 1]; old.len() + 1];
    for at_old in (0..old.len()).rev() {
        for at_new in (0..new.len()).rev() {
            common[at_old][at_new] = if old[at_old] == new[at_new] {
                common[at_old + 1][at_new + 1] + 1
            } else {
                common[at_old + 1][at_new].max(common[at_old][at_new + 1])
            };
        }
    }
    let (mut at_old, mut at_new, mut script) = (0, 0, Vec::with_capacity(old.len() + new.len()));
    while at_old < old.len() || at_new < new.len() {
        if at_old < old.len() && at_new < new.len() && old[at_old] == new[at_new] {
            script.push((' ', old[at_old]));
            (at_old, at_new) = (at_old + 1, at_new + 1);
        } else if at_old < old.len()
            && common[at_old + 1][at_new] >= common[at_old][(at_new + 1).min(new.len())]
        {
            script.push(('-', old[at_old]));
            at_old += 1;
        } else {
            script.push(('+', new[at_new]));
            at_new += 1;
        }
    }
    script
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_lines_are_shown_with_some_around_them() {
        let old = "1\n2\n3\n4\n5\n6\n7\n8\n9\n";
        let new = "1\n2\n3\nfour\n5\n6\n7\n8\n9\n10\n";
        let shown = ["@@", " 2", " 3", "-4", "+four", " 5", " 6", "@@", " 8", " 9", "+10"];
        assert_eq!(lines(old, new), shown);
        assert_eq!(lines("", "a\n"), ["+a"]);
        assert_eq!(lines("a\n", ""), ["-a"]);
        assert_eq!(lines(old, old), [""; 0]);
    }

    #[test]
    fn long_texts_are_compared_without_what_they_share() {
        let long = "line\n".repeat(200_000);
        let changed = format!("{long}new\n{long}");
        assert_eq!(
            lines(&format!("{long}{long}"), &changed),
            ["@@", " line", " line", "+new", " line", " line"]
        );
    }
}
