//! Options of one call reach the daemon.

use larder_testkit::fault_registry::{FaultRegistry, FaultTrigger, ResponseFault};
use larder_testkit_peers::{ImageBuilder, RegistryOptions, RegistryProcess, TlsMode};

use super::MachineWithDaemon;

const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

#[test]
fn a_time_limit_ends_the_call_and_not_the_daemon() {
    let Some(machine) = MachineWithDaemon::serving() else { return };
    let registry = FaultRegistry::start();
    let image = registry.put_image("shop/web", "1", LAYER, &[vec![0; 1024]], &[]);
    registry.fault(FaultTrigger::path(&image.layers[0]), ResponseFault::StallAfter(10));
    let name = registry.image("shop/web:1");
    for command in [
        &["pull", "--pull-timeout", "300ms"][..],
        &["pull", "--timeout", "300ms"],
        &["ensure", "-q", "--pull-timeout", "300ms"],
    ] {
        let run = machine.larder(&[command, &[&name]].concat()).expect(1);
        assert!(run.stderr.contains("not finished within 300ms"), "{run:?}");
        assert!(run.stderr.contains("hint: wait longer with --pull-timeout"), "{run:?}");
        assert!(!run.stderr.contains("have no effect"), "{run:?}");
        assert_eq!(run.stdout, "");
    }
    registry.clear_faults();
    let run = machine.larder(&["ensure", "-q", &name]).expect(0);
    assert_eq!((run.stdout.as_str(), run.stderr.as_str()), ("", ""));
}

#[test]
fn tls_verify_false_reaches_the_daemon_and_holds_for_one_call() {
    let Some(mut machine) = MachineWithDaemon::new() else { return };
    let options = RegistryOptions { tls: TlsMode::SelfSigned, ..RegistryOptions::default() };
    let registry = RegistryProcess::start(options).unwrap();
    ImageBuilder::small(1, 50_000).push(&registry, "shop/web:1").unwrap();
    let (name, host) = (registry.image("shop/web:1"), registry.address());
    let certs_d = machine.home.path().join("certs.d");
    fs_err::create_dir_all(certs_d.join(&host)).unwrap();
    fs_err::write(certs_d.join(&host).join("hosts.toml"), format!("server = \"https://{host}\"\n")).unwrap();
    machine.serve_with(&["--certs-d", &certs_d.to_string_lossy()]);
    for command in [&["pull"][..], &["ensure"]] {
        let refused = machine.larder(&[command, &[&name]].concat()).expect(1);
        let said = format!("{}{}", refused.stdout, refused.stderr);
        assert!(said.contains("certificate is self-signed and not trusted"), "{refused:?}");
        machine.larder(&[command, &["--tls-verify=false", &name]].concat()).expect(0);
        machine.larder(&["rm", &name]).expect(0);
    }
    machine.larder(&["pull", &name]).expect(1);
    // These ask the registry themselves.
    let certs_d = certs_d.to_string_lossy();
    for command in [&["explain", "access"][..], &["ensure", "--dry-run"]] {
        let asked =
            |flags: &[&str]| machine.larder(&[command, &["--certs-d", &certs_d], flags, &[&*name]].concat());
        asked(&[]).expect(1);
        asked(&["--tls-verify=false"]).expect(0);
    }
}
