use super::*;

struct TestImage {
    id: ImageId,
    artifact_type: &'static str,
    names: Vec<String>,
    labels: BTreeMap<String, String>,
    size: u64,
    seen: i64,
}

fn held(id: &'static str, names: &[&str], size: u64, seen: i64) -> TestImage {
    let names = names.iter().map(|&name| name.to_owned()).collect();
    TestImage { id: id.into(), artifact_type: "", names, labels: BTreeMap::new(), size, seen }
}

fn seen(images: &[TestImage]) -> Vec<KeepRuleInput<'_>> {
    images
        .iter()
        .map(|image| KeepRuleInput {
            id: &image.id,
            artifact_type: image.artifact_type,
            names: &image.names,
            labels: Some(&image.labels),
            size: image.size,
            first_seen: UnixMillis(image.seen),
            last_used: None,
        })
        .collect()
}

fn which<'a>(rule: &KeepRule, now: i64, images: &'a [TestImage]) -> Vec<&'a str> {
    let kept = matching_rules(UnixMillis(now), std::slice::from_ref(rule), &seen(images));
    kept.iter().zip(images).filter(|(kept, _)| kept.is_some()).map(|(_, image)| image.id.as_str()).collect()
}

/// The index of the rule that retains each image.
fn kept(rules: &[KeepRule], images: &[KeepRuleInput<'_>]) -> Vec<Option<usize>> {
    let kept = matching_rules(UnixMillis(40), rules, images);
    kept.into_iter().map(|kept| kept.map(|kept| kept.index)).collect()
}

fn by_name(name: &str) -> KeepRule {
    KeepRule::new(Selector::Name(name.into()))
}

#[test]
fn a_type_selects_artifacts_by_word_and_by_artifact_type() {
    let model = "application/vnd.cncf.model.manifest.v1+json";
    let images = [
        held("image", &["r.example/model:1"], 1, 0),
        TestImage { artifact_type: model, ..held("model", &["r.example/llm:1"], 1, 0) },
        TestImage { artifact_type: "application/vnd.example", ..held("other", &[], 1, 0) },
    ];
    for (of, expected) in [
        ("model", &["model"][..]),
        ("image", &["image"]),
        (model, &["model"]),
        ("application/*", &["model", "other"]),
        ("chart", &[]),
    ] {
        assert_eq!(which(&KeepRule::new(Selector::Type(of.into())), 0, &images), expected, "{of}");
    }
    let rule =
        KeepRule { ttl: Some(Duration::from_secs(3600)), ..KeepRule::new(Selector::Type("model".into())) };
    assert_eq!(rule.to_string(), "type model, for 1h0m0s after its last use");
    assert!(!rule.needs_all_images(), "it says of each image alone whether it is kept");
    assert!(KeepRule::new(Selector::Type(" ".into())).problem().is_some());
}

#[test]
fn a_name_may_have_wildcards_and_be_short() {
    let images = [
        held("a", &["docker.io/library/busybox:1.36"], 1, 0),
        held("b", &["registry.example/team/app:v1"], 1, 0),
        held("c", &[], 1, 0),
    ];
    for (pattern, expected) in [
        ("busybox:*", &["a"][..]),
        ("docker.io/*", &["a"]),
        ("*/team/*:v?", &["b"]),
        ("*", &["a", "b"]),
        ("app:v1", &[]),
        ("c", &["c"]),
    ] {
        assert_eq!(which(&by_name(pattern), 0, &images), expected, "{pattern}");
    }
}

#[test]
fn a_wildcard_pattern_made_to_be_slow_is_quick() {
    let text = "a".repeat(5000);
    assert!(!glob("*a*a*a*a*a*a*a*a*b", &text));
}

#[test]
fn digests_match_ids_and_named_digests() {
    let images = [held("sha256:aa", &[], 1, 0), held("b", &["r.example/app@sha256:bb"], 1, 0)];
    let rule = |digest: &str| KeepRule::new(Selector::Digest(digest.into()));
    assert_eq!(which(&rule("sha256:aa"), 0, &images), ["sha256:aa"]);
    assert_eq!(which(&rule("sha256:bb"), 0, &images), ["b"]);
    assert!(which(&rule("sha256:b"), 0, &images).is_empty());
}

#[test]
fn labels_match_with_and_without_value() {
    let mut images = [held("a", &[], 1, 0), held("b", &[], 1, 0)];
    images[0].labels.insert("keep".into(), "yes".into());
    images[1].labels.insert("keep".into(), "no".into());
    let rule = |value: Option<&str>| KeepRule::new(Selector::Label("keep".into(), value.map(str::to_owned)));
    assert_eq!(which(&rule(None), 0, &images), ["a", "b"]);
    assert_eq!(which(&rule(Some("yes")), 0, &images), ["a"]);
}

#[test]
fn the_newest_are_counted_per_repository() {
    let images = [
        held("a1", &["r.example:5000/a:1"], 1, 10),
        held("a2", &["r.example:5000/a:2"], 1, 20),
        held("a3", &["r.example:5000/a:3"], 1, 30),
        held("b1", &["r.example:5000/b:1"], 1, 5),
    ];
    let rule = KeepRule::new(Selector::Newest { repository: "r.example:5000/*".into(), count: 2 });
    assert_eq!(which(&rule, 40, &images), ["a2", "a3", "b1"]);
}

#[test]
fn a_time_to_live_and_a_budget_end_what_is_kept() {
    let images = [held("old", &["a:1"], 60, 0), held("new", &["a:2"], 60, 9000)];
    let ttl = KeepRule { ttl: Some(Duration::from_secs(5)), ..by_name("a:*") };
    assert_eq!(which(&ttl, 10_000, &images), ["new"]);
    let budget = KeepRule { budget_bytes: Some(100), ..by_name("a:*") };
    assert_eq!(which(&budget, 10_000, &images), ["new"]);
    let budget = KeepRule { budget_bytes: Some(120), ..by_name("a:*") };
    assert_eq!(which(&budget, 10_000, &images), ["old", "new"]);
}

#[test]
fn similar_names_have_a_similar_repository_and_a_common_registry_is_not_enough() {
    let names: Vec<String> = [
        "r.example:5000/shop/web:1",
        "r.example:5000/shop/api:2",
        "r.example:5000/tools/etcd:3",
        "s.example/web:2",
    ]
    .map(String::from)
    .into();
    for (text, expected) in [
        ("r.example:5000/shop/wbe:1", &["r.example:5000/shop/web:1", "s.example/web:2"][..]),
        ("r.example:5000/shop/web:2", &["r.example:5000/shop/web:1", "s.example/web:2"]),
        ("we", &["s.example/web:2", "r.example:5000/shop/web:1"]),
        ("etc", &["r.example:5000/tools/etcd:3"]),
        ("r.example:5000/shop/cart:1", &[]),
        ("a", &[]),
    ] {
        assert_eq!(nearest_names(text, &names), expected, "{text}");
    }
}

#[test]
fn a_rule_that_matches_nothing_names_what_is_near() {
    let images =
        [held("a", &["docker.io/library/busybox:1.36"], 1, 0), held("b", &["quay.io/x/etcd:3"], 1, 0)];
    let rules = [by_name("bussybox:1.36"), by_name("busybox*"), by_name("zzz")];
    let warnings: Vec<String> = warnings(&rules, &seen(&images)).iter().map(ToString::to_string).collect();
    assert_eq!(
        warnings,
        [
            "keep rule 1 (name bussybox:1.36) matches no image; similar images: docker.io/library/busybox:1.36",
            "keep rule 3 (name zzz) matches no image",
        ]
    );
}

#[test]
fn an_image_that_a_rule_cannot_judge_is_kept_outside_of_its_budget() {
    let mut images = [held("known", &[], 60, 10), held("unknown", &[], 60, 20), held("other", &[], 60, 30)];
    images[0].labels.insert("keep".into(), "yes".into());
    let mut seen = seen(&images);
    seen[1].labels = None;
    let rule = KeepRule::new(Selector::Label("keep".into(), None));
    assert_eq!(kept(std::slice::from_ref(&rule), &seen), [Some(0), Some(0), None]);
    let budget = KeepRule { budget_bytes: Some(60), ..rule.clone() };
    assert_eq!(kept(&[budget], &seen), [Some(0), Some(0), None]);
    let over = KeepRule { ttl: Some(Duration::from_millis(5)), ..rule };
    assert_eq!(kept(&[over], &seen), [None, None, None], "its time is over, whatever its labels");
}

#[test]
fn a_rule_returns_the_name_that_it_matches() {
    let names = ["api:2", "docker.io/library/keepme:1", "web@sha256:1"].map(str::to_owned);
    let newest = |repository: &str| Selector::Newest { repository: repository.into(), count: 1 };
    for (select, meant) in [
        (Selector::Name("keepme:*".into()), Some(1)),
        (newest("api"), Some(0)),
        (newest("web"), Some(2)),
        (Selector::Digest("sha256:1".into()), Some(2)),
        (Selector::Label("keep".into(), None), None),
    ] {
        assert_eq!(KeepRule::new(select.clone()).parse_selector(&names), meant, "{select:?}");
    }
}

#[test]
fn a_pattern_that_no_name_can_match_is_refused() {
    let problem = |pattern: &str| KeepRule::new(Selector::Name(pattern.to_owned())).problem();
    for (bad, shown) in [
        (
            "Bad/[x",
            "\"Bad/[x\": invalid reference format; expected [registry[:port]/]repository[:tag][@digest]",
        ),
        ("Bad", "lower case"),
        ("shop/[ab]*", "brackets are not supported; use * for any text"),
        ("a/Bad/*", "write them in lower case"),
        ("registry.example/Team/*:1", "write them in lower case"),
        ("shop/web *", "no image name has \" \""),
        ("{a,b}/*", "no image name has \"{\""),
        ("shop/web:", "add a tag"),
    ] {
        let found = problem(bad).unwrap_or_else(|| panic!("{bad} is refused"));
        assert!(found.contains(shown), "{bad}: {found}");
    }
    let digest = format!("sha256:{}", "a".repeat(64));
    for good in [
        "*",
        "Team/*",
        "shop/*",
        "busybox",
        "docker.io/library/*:1.?",
        "127.0.0.1:5000/*",
        "REGISTRY.example/app:V1",
        "Registry.example/*:RC-*",
        "*/app@sha256:*",
        "[::1]:5000/*",
        "*:5*/app",
        "app*_",
        "app:1#linux/arm64",
        "*#linux/*",
        &digest,
        &format!("app@{digest}"),
    ] {
        assert_eq!(problem(good), None, "{good}");
    }
    let newest = Selector::Newest { repository: "a/Team/x*".into(), count: 2 };
    assert!(KeepRule::new(newest).problem().is_some());
}
