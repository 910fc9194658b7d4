//! Manifests as people write them, and as they should not.

use proptest::prelude::*;

use super::*;

fn read(text: &str) -> Manifests {
    let mut manifests = Manifests::default();
    manifests.read_text("app.yaml", text, "default");
    manifests
}

fn problems(text: &str) -> Vec<String> {
    read(text).problems.iter().map(ToString::to_string).collect()
}

/// `label part image policy field` of every want.
fn wants(manifests: &Manifests) -> Vec<String> {
    let all = manifests.workloads.iter().flat_map(|workload| {
        workload.wants.iter().map(|want| {
            let policy = want.policy.as_ref().map_or("-", |policy| policy.as_str());
            format!("{} {} {} {policy} {}", workload.label, want.part, want.image, want.field_path)
        })
    });
    all.collect()
}

#[test]
fn a_pod_wants_the_images_of_all_its_containers_and_image_volumes() {
    let manifests = read(
        "apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop, uid: u-1, annotations: {team: web, empty: }}
spec:
  serviceAccountName: seller
  imagePullSecrets: [{name: regcred}, {}]
  initContainers: [{name: migrate, image: migrate:1}]
  containers:
    - {name: web, image: web, imagePullPolicy: Never}
  ephemeralContainers: [{name: debug, image: busybox}]
  volumes:
    - {name: tmp, emptyDir: {}}
    - {name: model, image: {reference: models/m:2, pullPolicy: Always}}
",
    );
    assert_eq!(manifests.problems, []);
    assert_eq!(
        wants(&manifests),
        [
            "pod/web migrate migrate:1 - spec.initContainers{migrate}",
            "pod/web web web Never spec.containers{web}",
            "pod/web debug busybox - spec.ephemeralContainers{debug}",
            "pod/web model models/m:2 Always ",
        ]
    );
    let workload = &manifests.workloads[0];
    let secrets: Vec<_> = workload.pull_secrets.iter().map(|secret| secret.name.as_str()).collect();
    assert_eq!(secrets, ["regcred"]);
    assert_eq!((workload.pod.uid.as_str(), workload.pod.namespace.as_str()), ("u-1", "shop"));
    assert_eq!(workload.pod.service_account, "seller");
    assert_eq!(workload.pod.annotations["team"], "web");
}

#[test]
fn templates_are_found_in_each_kind_and_in_lists() {
    let manifests = read(
        r#"apiVersion: v1
kind: List
items:
- apiVersion: apps/v1
  kind: Deployment
  metadata: {name: api}
  spec: {template: {metadata: {annotations: {a: b}}, spec: {containers: [{name: c, image: api:1}]}}}
- apiVersion: batch/v1
  kind: CronJob
  metadata: {name: report}
  spec: {jobTemplate: {spec: {template: {spec: {containers: [{name: c, image: report:1}]}}}}}
---
{"apiVersion": "v1", "kind": "PodList", "items": [
  {"metadata": {"name": "one"}, "spec": {"containers": [{"name": "c", "image": "one:1"}]}}
]}
"#,
    );
    assert_eq!(manifests.problems, []);
    assert_eq!(
        wants(&manifests),
        [
            "deployment/api c api:1 - spec.containers{c}",
            "cronjob/report c report:1 - spec.containers{c}",
            "pod/one c one:1 - spec.containers{c}",
        ]
    );
    assert_eq!(manifests.workloads[0].pod.annotations["a"], "b", "those of the template");
}

#[test]
fn one_bad_document_does_not_take_the_others_with_it() {
    let manifests = read(
        "apiVersion: v1
kind: Pod
metadata: {name: good}
spec: {containers: [{name: c, image: busybox}]}
---
kind: Pod
  bad: [indentation
---
services: {web: {image: busybox}}
---
apiVersion: v1
kind: Pod
metadata:
  name: bad
spec:
  containers:
    - name: c
      image: Busybox
    - name: d
      image: 1.25
      imagePullPolicy: always
---
apiVersion: v1
kind: Pod
metadata: {name: good-too}
spec: {containers: [{name: c, image: busybox}]}
",
    );
    assert_eq!(
        wants(&manifests),
        ["pod/good c busybox - spec.containers{c}", "pod/good-too c busybox - spec.containers{c}"]
    );
    let problems: Vec<_> = manifests.problems.iter().map(ToString::to_string).collect();
    assert!(problems[0].starts_with("app.yaml:7: document 2: not valid YAML: "), "{}", problems[0]);
    assert_eq!(
        problems[1..],
        [
            "app.yaml:9: document 3: not a Kubernetes object: apiVersion and kind are missing",
            "app.yaml:18: document 4 (Pod default/bad): spec.containers[0].image: \
             \"Busybox\": repository name must be lowercase",
            "app.yaml:20: document 4 (Pod default/bad): spec.containers[1].image: must be a string, is the number 1.25",
            "app.yaml:21: document 4 (Pod default/bad): spec.containers[1].imagePullPolicy: \
             \"always\": must be Always, IfNotPresent or Never",
        ]
    );
    assert_eq!(manifests.problems[4].hints(), ["write Always".into()]);
}

#[test]
fn missing_fields_of_a_pod_are_named() {
    for (spec, problem) in [
        ("", "app.yaml:2: document 1 (Pod default/p): spec: required"),
        ("spec: {containers: []}", "spec.containers: a pod must have at least one container"),
        ("spec: {volumes: []}", "spec.containers: a pod must have at least one container"),
        ("spec: {containers: web}", "spec.containers: must be a list, is a string"),
        ("spec: {containers: [{image: a}]}", "spec.containers[0].name: required"),
        ("spec: {containers: [{name: a}]}", "spec.containers[0].image: required"),
        ("spec: {containers: [{name: a, image: ''}]}", "image: \"\": an image name must not be empty"),
        (
            "spec: {containers: [{name: a, image: b}], volumes: [{name: v, image: {}}]}",
            "spec.volumes[0].image.reference: required",
        ),
    ] {
        let text = format!("\nkind: Pod\napiVersion: v1\nmetadata: {{name: p}}\n{spec}\n");
        let found = problems(&text);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].ends_with(problem), "{} for {problem}", found[0]);
    }
}

#[test]
fn missing_fields_of_an_object_are_named() {
    for (text, problem) in [
        ("just words\n", "app.yaml:1: document 1: not a Kubernetes object: must be a mapping, is a string"),
        ("kind: Pod\n", "app.yaml:1: document 1: not a Kubernetes object: apiVersion is missing"),
        (
            "apiVersion: v1\nkind: Pod\nspec: {containers: [{name: a, image: b}]}\n",
            "app.yaml:1: document 1 (Pod): metadata.name: required",
        ),
        (
            "apiVersion: v1\nkind: Pod\nmetadata: none\nspec: {containers: [{name: a, image: b}]}\n",
            "app.yaml:3: document 1 (Pod): metadata: must be a mapping, is a string",
        ),
        ("", "app.yaml: no document in it"),
        (
            "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: d}\nspec: {}\n",
            "app.yaml:1: document 1 (Deployment default/d): spec.template: required",
        ),
    ] {
        assert_eq!(problems(text), [problem], "{text}");
    }
}

#[test]
fn other_kinds_are_counted_and_no_error() {
    let manifests = read("apiVersion: v1\nkind: Service\n---\napiVersion: v1\nkind: Service\n");
    assert_eq!(manifests.problems, []);
    assert_eq!(manifests.skipped["Service"], 2);
}

#[test]
fn the_last_of_two_secrets_wins_with_a_warning() {
    let secret = "apiVersion: v1\nkind: Secret\nmetadata: {name: s}\nstringData: {k: ";
    let manifests = read(&format!("{secret}one}}\n---\n{secret}two}}\n"));
    let Some(SecretEntry::Sound(found)) = manifests.secrets.get("default", "s") else { panic!("no secret") };
    assert_eq!(found.data["k"], b"two");
    assert_eq!(
        manifests.warnings,
        [
            "app.yaml: document 2 (Secret default/s): used instead of the one in app.yaml: document 1 (Secret default/s)"
        ]
    );
}

#[test]
fn a_broken_secret_is_remembered_by_its_name_until_a_sound_one_takes_it() {
    let broken = "apiVersion: v1\nkind: Secret\nmetadata: {name: s}\ndata: {k: '!'}\n";
    let sound = broken.replace("'!'", "b25l");
    let named = |text: &str| format!("{:?}", read(text).secrets.get("default", "s"));
    assert!(named(broken).starts_with("Some(Broken("), "{}", named(broken));
    assert!(named(&format!("{broken}---\n{sound}")).starts_with("Some(Sound("));
    let text = format!("{sound}---\n{broken}");
    assert!(named(&text).starts_with("Some(Broken("));
    assert_eq!(read(&text).secrets.iter().count(), 0, "what was replaced is not used");
}

#[test]
fn problems_show_nothing_of_a_secret() {
    let text = "apiVersion: v1
kind: Secret
metadata: {name: s}
type: kubernetes.io/dockerconfigjson
data: {.dockerconfigjson: hunter2!}
---
apiVersion: v1
kind: Secret
metadata: {name: s}
stringData: {password: [hunter2]}
---
apiVersion: v1
kind: Secret
metadata: {name: s}
stringData: {password: hunter2: hunter2}
---
apiVersion: v1
kind: Secret
metadata: {name: s}
stringData:
  hunter2: 1
  hunter2: 2
---
apiVersion: v1
kind: Secret
metadata: {name: s}
stringData: {password: 80443921}
---
apiVersion: v1
kind: SecretList
items: [{metadata: {name: s}, data: {password: 80443921}}]
";
    let read = read(text);
    assert_eq!(read.problems.len(), 6, "{:?}", read.problems);
    let data: Vec<_> = read.problems.iter().map(LocatedProblem::as_data).collect();
    let all = format!("{:?} {} {:?}", read.problems, serde_json::to_string(&data).unwrap(), read.warnings);
    assert!(!all.contains("hunter2") && !all.contains("80443921"), "{all}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn no_text_panics(text in "\\PC*") {
        read(&text);
    }

    #[test]
    fn no_text_of_yaml_signs_panics(text in "[-{}\\[\\]:,\"'&*!|>%@? #\n\ta-c0]{0,200}") {
        read(&text);
    }

    #[test]
    fn no_shape_of_a_pod_panics(
        spec in r#"(null|1|\[\]|\{\}|\[\{\}\]|\[null\]|\[\{name: 1\}\]|\[\{name: a, image: [a-zA-Z:/@ ]{0,8}\}\]|"x")"#,
        field in "(containers|initContainers|volumes|imagePullSecrets|spec|metadata|data|items)",
        kind in "(Pod|Secret|List|PodList|Deployment|CronJob)",
    ) {
        read(&format!("apiVersion: v1\nkind: {kind}\nmetadata: {{name: a}}\nspec: {{{field}: {spec}}}\n"));
        read(&format!("apiVersion: apps/v1\nkind: {kind}\n{field}: {spec}\n"));
    }
}
