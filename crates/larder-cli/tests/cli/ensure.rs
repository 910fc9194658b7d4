//! `larder ensure` and `larder pull`: events, summary, exit codes, and calls to the runtime.

use std::io::{BufRead as _, BufReader};
use std::process::Stdio;

use larder_testkit_peers::fake_cri::Rpc;
use larder_testkit_peers::process::wait_until;
use serde_json::json;
use tonic::Code;

use crate::world::CliFixture;

/// A pod with one container of this image.
fn pod(name: &str, image: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec: {{containers: [{{name: main, image: '{image}'}}]}}\n---\n"
    )
}

#[test]
fn a_missing_image_is_pulled_with_kubelets_events_and_found_the_next_time() {
    let world = CliFixture::offering(&["busybox:1.36"]);
    world.file("pod.yaml", &pod("web", "busybox:1.36"));
    world.larder(&["ensure", "-f", "pod.yaml"]).expect(0).golden("ensure-pulled.txt", &world);
    world.larder(&["ensure", "-f", "pod.yaml"]).expect(0).golden("ensure-present.txt", &world);
    assert_eq!(world.cri.calls(Rpc::PullImage).started, 1);
}

#[test]
fn a_failed_pull_prints_when_the_back_off_ends() {
    let world = CliFixture::new();
    world.file("pod.yaml", &pod("web", "busybox:1.36"));
    world.cri.refuse(Rpc::PullImage, Code::Unknown, "no route to host");
    world.larder(&["ensure", "-f", "pod.yaml"]).expect(1).golden("ensure-failed.txt", &world);
}

#[test]
fn policies_are_of_the_flag_then_the_manifest_then_the_tag() {
    let world = CliFixture::offering(&["busybox:latest", "busybox:1.36"]);
    world.larder(&["ensure", "busybox:latest", "busybox:1.36"]).expect(0);
    assert_eq!(world.cri.calls(Rpc::PullImage).started, 2);
    world.larder(&["ensure", "busybox", "busybox:1.36"]).expect(0);
    assert_eq!(world.cri.calls(Rpc::PullImage).started, 3, "`latest` is pulled again, a version is not");
    world.larder(&["ensure", "--policy", "ifnotpresent", "busybox"]).expect(0);
    assert_eq!(world.cri.calls(Rpc::PullImage).started, 3);
    world.larder(&["ensure", "--policy=Never", "busybox:1.36"]).expect(0);
    world.larder(&["ensure", "--policy=Never", "absent:1"]).expect(1).golden("ensure-never.txt", &world);
}

#[test]
fn a_retry_waits_for_the_back_off_and_shows_it() {
    let world = CliFixture::offering(&["busybox:1.36"]);
    world.cri.fail_next(Rpc::PullImage, Code::Unknown, "no route to host");
    let run = world.larder(&["ensure", "--retry-for", "8s", "busybox:1.36"]).expect(1);
    assert!(run.stdout.contains("Back-off pulling image \"busybox:1.36\""), "{run:?}");
    assert!(run.stdout.contains("Error: ImagePullBackOff"), "{run:?}");
    assert!(!run.stderr.contains("may be temporary"), "it already has --retry-for: {run:?}");
    assert!(run.stderr.contains(", after --retry-for 8s"), "{run:?}");
}

#[test]
fn a_pull_that_takes_too_long_is_canceled_and_counts_as_failed() {
    let world = CliFixture::offering(&["busybox:1.36"]);
    world.cri.hang_next(Rpc::PullImage);
    let run = world.larder(&["ensure", "--pull-timeout", "200ms", "busybox:1.36"]).expect(1);
    assert!(run.stdout.contains("not finished within 200ms"), "{run:?}");
    assert!(run.stderr.contains("wait longer with --pull-timeout"), "{run:?}");
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(world.cri.until(Rpc::PullImage, |calls| calls.canceled == 1));
    world.larder(&["pull", "--pull-timeout", "1m", "busybox:1.36"]).expect(0);
}

#[test]
fn two_pods_that_want_one_image_cause_one_pull() {
    let world = CliFixture::offering(&["busybox:1.36"]);
    world.file("pods.yaml", &(pod("one", "busybox:1.36") + &pod("two", "busybox:1.36")));
    let held = world.cri.hold_next(Rpc::PullImage);
    let mut child = world
        .command(&["ensure", "-f", "pods.yaml"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    // A pod joins the pull right after this event.
    assert_eq!(lines.by_ref().filter(|line| line.contains("Pulling image")).take(2).count(), 2);
    held.release();
    assert_eq!(lines.last().unwrap(), "0 present, 2 pulled, 0 failed");
    assert!(child.wait().unwrap().success());
    assert_eq!(world.cri.calls(Rpc::PullImage).started, 1);
}

#[test]
fn json_has_images_events_bad_input_and_a_summary() {
    let world = CliFixture::offering(&["busybox:1.36"]);
    let service = "apiVersion: v1\nkind: Service\n";
    world.file("pod.yaml", &(pod("web", "busybox:1.36") + &pod("bad", "Bad") + service));
    let run = world.larder(&["ensure", "-f", "pod.yaml", "-o", "json"]).expect(2);
    let mut json = run.json();
    let image = &json["images"][0];
    assert!(image["pullSeconds"].is_f64() && image["totalSeconds"].is_f64(), "{image}");
    for key in ["pullSeconds", "totalSeconds"] {
        json["images"][0][key] = json!(0.0);
    }
    assert_eq!(json["skipped"], json!([{"kind": "Service", "count": 1}]));
    let bad = json["images"].as_array_mut().unwrap().pop().unwrap();
    assert_eq!((&bad["result"], &bad["reason"]), (&json!("Failed"), &json!("InvalidImageName")));
    assert_eq!(
        json["images"],
        json!([{
            "image": "busybox:1.36", "policy": "IfNotPresent", "object": "pod/web", "namespace": "default",
            "container": "main", "field": "spec.containers{main}", "result": "Pulled", "reason": null, "message": null,
            "id": format!("sha256:{:064x}", 1), "sizeBytes": 4_261_550, "pullSeconds": 0.0, "totalSeconds": 0.0,
            "missingBytes": null, "retryInSeconds": null,
        }])
    );
    assert_eq!(
        json["badInput"],
        json!([{
            "file": "pod.yaml", "line": 9, "document": 2, "object": "Pod default/bad",
            "field": "spec.containers[0].image", "message": "\"Bad\": repository name must be lowercase",
            "hints": ["did you mean bad?"],
        }])
    );
    let events = json["events"].as_array_mut().unwrap();
    events.retain(|event| event["object"] == "pod/web");
    let reasons: Vec<_> = events.iter().map(|event| event["reason"].as_str().unwrap()).collect();
    assert_eq!(reasons, ["Pulling", "Pulled"]);
    assert_eq!(events[0]["object"], "pod/web");
    assert_eq!(events[0]["message"], "Pulling image \"busybox:1.36\"");
    assert!(events[0]["time"].as_str().unwrap().ends_with('Z'), "{}", events[0]);
}

#[test]
fn yaml_has_the_shape_of_json() {
    let world = CliFixture::offering(&["busybox:1.36"]);
    let run = world.larder(&["ensure", "busybox:1.36", "-o", "yaml"]).expect(0);
    let value: serde_json::Value = serde_saphyr::from_str(&run.stdout).unwrap();
    assert_eq!(value["summary"], json!({"present": 0, "pulled": 1, "failed": 0, "unfinished": 0}));
    assert_eq!(value["images"][0]["result"], "Pulled");
}

#[test]
fn pods_are_passed_to_the_runtime_with_annotations_and_sandbox() {
    let world = CliFixture::offering(&["busybox:1.36"]);
    let text =
        pod("web", "busybox:1.36").replace("{name: web}", "{name: web, uid: u-1, annotations: {a: b}}");
    world.larder_reading(&text, &["ensure", "-f", "-"]).expect(0);
    let received = world.cri.received();
    let pull = received.iter().find(|received| received.rpc == Rpc::PullImage).unwrap();
    assert_eq!(pull.image.as_ref().unwrap().annotations["a"], "b");
    let metadata = pull.sandbox.as_ref().unwrap().metadata.as_ref().unwrap();
    assert_eq!((metadata.name.as_str(), metadata.uid.as_str()), ("web", "u-1"));
}

#[test]
fn pull_prints_the_ids_in_the_order_of_the_arguments() {
    let world = CliFixture::offering(&["a:1", "b:1"]);
    let run = world.larder(&["pull", "b:1", "a:1"]).expect(0);
    run.golden("pull.txt", &world);
    let run = world.larder(&["pull", "-q", "a:1"]).expect(0);
    assert_eq!((run.stdout, run.stderr), (format!("sha256:{:064x}\n", 1), String::new()));
    world.larder(&["pull", "a:1", "nowhere:1", "Bad"]).expect(2).golden("pull-failed.txt", &world);
}

#[test]
fn pull_prints_the_outcome_of_each_image_as_json() {
    let mut world = CliFixture::offering(&["a:1"]);
    let run = world.larder(&["pull", "-o", "json", "a:1", "nowhere:1", "Bad"]).expect(2);
    let mut json = run.json();
    for key in ["pullSeconds", "totalSeconds"] {
        assert!(json[0][key].is_f64(), "{json}");
        json[0][key] = json!(0.0);
    }
    assert_eq!(
        json,
        json!([
            {
                "image": "a:1", "result": "Pulled", "reason": null, "message": null,
                "id": format!("sha256:{:064x}", 1), "sizeBytes": 4_261_550, "pullSeconds": 0.0, "totalSeconds": 0.0,
                "missingBytes": null,
            },
            {
                "image": "nowhere:1", "result": "Failed", "reason": "ErrImagePull",
                "message": "rpc error: code = NotFound desc = failed to resolve nowhere:1: not found",
                "id": null, "sizeBytes": null, "pullSeconds": null, "totalSeconds": null, "missingBytes": null,
            },
        ])
    );
    assert!(!run.stderr.contains("Pulled"), "{run:?}");
    world.cri.stop();
    let run = world.larder(&["pull", "-o", "yaml", "a:1"]).expect(3);
    let value: serde_json::Value = serde_saphyr::from_str(&run.stdout).unwrap();
    assert_eq!(value[0]["result"], "Unfinished");
    assert_eq!(world.larder(&["pull", "-o", "json", "Bad"]).expect(2).json(), json!([]));
}

#[test]
fn a_directory_is_read_by_name_and_deeper_only_if_asked() {
    let world = CliFixture::offering(&["a:1", "b:1", "c:1"]);
    world.file("pods/b.yml", &pod("b", "b:1"));
    world.file("pods/a.yaml", &pod("a", "a:1"));
    world.file("pods/deep/c.json", &json_pod("c", "c:1"));
    world.file("pods/README.md", "not: [a manifest");
    let images = |flags: &[&str]| {
        let run = world.larder(&[&["ensure", "-f", "pods", "-o", "json"], flags].concat()).expect(0);
        let images = run.json()["images"].as_array().unwrap().clone();
        images.iter().map(|image| image["image"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(images(&[]), ["a:1", "b:1"]);
    assert_eq!(images(&["-R"]), ["a:1", "b:1", "c:1"]);
}

#[test]
fn pipes_are_read_where_they_are_named_and_not_where_they_lie_in_a_directory() {
    let world = CliFixture::offering(&["a:1", "b:1"]);
    world.file("pods/a.yaml", &pod("a", "a:1"));
    let pipe = world.home.path().join("pods/b.yaml");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR).unwrap();
    let run = world.larder(&["ensure", "-f", "pods"]).expect(0);
    assert!(run.stderr.contains("warning: pods/b.yaml: skipped: not a regular file"), "{run:?}");
    assert!(run.stdout.contains("0 present, 1 pulled, 0 failed"), "{run:?}");

    let writer = std::thread::spawn(move || fs_err::write(pipe, pod("b", "b:1")));
    let run = world.larder(&["ensure", "-f", "pods/b.yaml"]).expect(0);
    assert!(run.stdout.contains("0 present, 1 pulled, 0 failed"), "{run:?}");
    writer.join().unwrap().unwrap();
}

fn json_pod(name: &str, image: &str) -> String {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {"containers": [{"name": "main", "image": image}]},
    })
    .to_string()
}

#[test]
fn a_closed_output_is_a_quiet_success() {
    let world = CliFixture::offering(&["busybox:1.36"]);
    for arguments in [&["ensure", "busybox:1.36"][..], &["images"], &["--help"], &["completions", "bash"]] {
        let mut child = world
            .command(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let run = crate::world::CliOutput::of(child.wait_with_output().unwrap()).expect(0);
        assert_eq!(run.stderr, "", "{arguments:?}");
    }
}

#[test]
fn a_result_that_cannot_be_written_is_an_error() {
    let world = CliFixture::offering(&["busybox:1.36"]);
    let full = fs_err::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut command = world.command(&["pull", "busybox:1.36"]);
    let run = crate::world::CliOutput::of(command.stdout(full.into_parts().0).output().unwrap()).expect(1);
    assert!(run.stderr.contains("cannot write the result"), "{run:?}");
}

#[test]
fn a_bad_name_fails_its_container_and_not_the_pod() {
    let world = CliFixture::offering(&["busybox:1.36"]);
    world.file(
        "pod.yaml",
        "apiVersion: v1
kind: Pod
metadata: {name: web}
spec: {containers: [{name: bad, image: Busybox}, {name: good, image: 'busybox:1.36'}]}
",
    );
    let run = world.larder(&["ensure", "-f", "pod.yaml"]).expect(2);
    run.with_sorted_events().golden("ensure-bad-name.txt", &world);
}

#[test]
fn an_object_of_any_kind_with_a_pod_template_wants_the_images_of_its_pods() {
    let world = CliFixture::offering(&["a:1", "b:1"]);
    let object = |api_version: &str, kind: &str, container: &str| {
        format!(
            "apiVersion: {api_version}\nkind: {kind}\nmetadata: {{name: web}}\n\
             spec: {{template: {{spec: {{containers: [{container}]}}}}}}\n---\n"
        )
    };
    let text = object("argoproj.io/v1alpha1", "Rollout", "{name: main, image: 'a:1'}")
        + &object("serving.knative.dev/v1", "Service", "{image: 'b:1'}");
    world.file("others.yaml", &text);
    let json = world.larder(&["ensure", "-f", "others.yaml", "-o", "json"]).expect(0).json();
    assert_eq!(json["summary"]["pulled"], 2, "{json}");
    assert_eq!(
        (&json["images"][0]["object"], &json["images"][0]["container"]),
        (&json!("rollout/web"), &json!("main"))
    );
    assert_eq!(
        (&json["images"][1]["object"], &json["images"][1]["container"]),
        (&json!("service/web"), &json!(null))
    );
    assert_eq!(json["images"][1]["field"], "spec.containers[0]");
}

#[test]
fn a_misspelt_kind_is_bad_input_and_a_strange_one_is_not() {
    let world = CliFixture::offering(&["busybox:1.36"]);
    world.file(
        "pod.yaml",
        &(pod("web", "busybox:1.36") + "apiVersion: apps/v1\nkind: Deploymnet\nmetadata: {name: x}\n"),
    );
    let run = world.larder(&["ensure", "-f", "pod.yaml"]).expect(2);
    assert!(
        run.stderr.contains("apps/v1 has no kind \"Deploymnet\"\nhint: did you mean Deployment?\n"),
        "{run:?}"
    );
    world
        .file("other.yaml", &(pod("web", "busybox:1.36") + "apiVersion: example.com/v1\nkind: Deploymnet\n"));
    world.larder(&["ensure", "-f", "other.yaml"]).expect(0);
}

/// The first process answers about an image while the second collects: whichever comes first, an image that was
/// reported as present is present.
#[test]
fn an_image_reported_as_present_outlives_a_collection_of_another_process() {
    const NAME: &str = "r.example/shop/web:1";
    const ALL: [&str; 4] = ["gc", "--all-unused", "--force", "--minimum-image-ttl-duration=0"];
    let present = |world: &CliFixture| {
        let mut names = 0;
        world.cri.change(|contents| names = contents.images.len());
        names == 1
    };
    for holds_the_ensure in [true, false] {
        let world = CliFixture::offering(&[NAME]);
        world.larder(&["pull", NAME]).expect(0);
        world.end_leases();
        // The first waits in the middle of its call to the runtime, with the image still unleased.
        let (rpc, first, second) = if holds_the_ensure {
            (Rpc::ImageStatus, &["ensure", NAME][..], &ALL[..])
        } else {
            (Rpc::RemoveImage, &ALL[..], &["ensure", NAME][..])
        };
        let before = world.cri.calls(rpc).started;
        let held = world.cri.hold_next(rpc);
        std::thread::scope(|scope| {
            let first = scope.spawn(|| world.larder(first));
            wait_until("the first waits", || world.cri.calls(rpc).started > before);
            let looks = world.cri.calls(Rpc::ImageStatus).started;
            let second = scope.spawn(|| world.larder(second));
            wait_until("the collection ended, or the ensure has found the image", || {
                if holds_the_ensure {
                    second.is_finished()
                } else {
                    world.cri.calls(Rpc::ImageStatus).started > looks
                }
            });
            held.release();
            first.join().unwrap().expect(0);
            second.join().unwrap().expect(0);
        });
        assert!(present(&world), "ensure first: {holds_the_ensure}");
        world.larder(&ALL).expect(0);
        assert!(present(&world), "leased, also for a process that comes later");
    }
}
