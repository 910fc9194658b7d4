//! Programs that embed larder: everything that a [`LocalNode`] does, behind a private CA and a login.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use larder::events::{Event, EventSink};
use larder::pod::Pod;
use larder::pull::{EnsureRequest, PullPolicy};
use larder::retention::{KeepRule, Selector};
use larder_agent::{ErrorKind, LocalNode, LocalNodeOptions};
use larder_testkit_peers::registry::{PASSWORD, USER};
use larder_testkit_peers::tls::CertificateRequest;
use larder_testkit_peers::{
    ImageBuilder, Package, RegistryAccess, RegistryOptions, RegistryProcess, TlsMode, require,
};
use parking_lot::Mutex;
use tempfile::TempDir;

struct PrivateRegistry {
    registry: RegistryProcess,
    dir: TempDir,
}

impl PrivateRegistry {
    fn start() -> Option<PrivateRegistry> {
        if !require(&[Package::DockerRegistry, Package::Skopeo, Package::Openssl]).is_available() {
            return None;
        }
        let options = RegistryOptions {
            auth: RegistryAccess::Basic,
            tls: TlsMode::PrivateCa,
            ..RegistryOptions::default()
        };
        let registry = RegistryProcess::start(options).unwrap();
        ImageBuilder::small(1, 50_000).push(&registry, "shop/web:1").unwrap();
        let dir = tempfile::tempdir().unwrap();
        let (address, ca) = (registry.address(), registry.ca().unwrap());
        let hosts = dir.path().join("certs.d").join(&address);
        fs_err::create_dir_all(&hosts).unwrap();
        let text = format!("server = \"https://{address}\"\nca = \"{}\"\n", ca.display());
        fs_err::write(hosts.join("hosts.toml"), text).unwrap();
        Some(PrivateRegistry { registry, dir })
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join(name)
    }

    fn options(&self) -> LocalNodeOptions {
        let login = (USER.to_owned(), PASSWORD.to_owned());
        LocalNodeOptions {
            certs_dirs: vec![self.path("certs.d")],
            logins: [(self.registry.address(), login)].into(),
            ..LocalNodeOptions::default()
        }
    }
}

#[derive(Default)]
struct KeptEvents(Mutex<Vec<String>>);

impl EventSink for KeptEvents {
    fn record(&self, event: Event) {
        self.0.lock().push(event.reason.to_string());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_in_a_program_does_what_the_commands_do() {
    let Some(private) = PrivateRegistry::start() else { return };
    let web = private.registry.image("shop/web:1");
    let request = EnsureRequest::new(web.as_str(), PullPolicy::IfNotPresent, Pod::default());
    let events = Arc::new(KeptEvents::default());
    let options = LocalNodeOptions { events: Some(events.clone()), ..private.options() };
    assert!(!format!("{options:?}").contains(PASSWORD));
    let node = LocalNode::open_with(private.path("store"), options).await.unwrap();
    let mut reports = 0;
    let pulled = node.ensure_with_progress(&request, |_| reports += 1).await.unwrap();
    assert!(reports > 0, "the first report comes at once");
    assert!(events.0.lock().contains(&"Pulled".to_owned()), "{:?}", events.0.lock());

    node.tag(&web, "app:1").await.unwrap();
    node.lease(&web, Duration::from_secs(60)).await.unwrap();
    node.keep(&KeepRule::new(Selector::Name("app:*".into()))).await.unwrap();
    let why = node.explain(&web).await.unwrap().decision.unwrap().why;
    assert!(why.contains("kept") || why.contains("leased"), "{why}");

    let (archive, files) = (private.path("web.tar"), private.path("files.tar"));
    node.save(&[&web], fs_err::File::create(&archive).unwrap()).await.unwrap();
    node.export(&web, fs_err::File::create(&files).unwrap()).await.unwrap();
    assert!(tar::Archive::new(fs_err::File::open(&files).unwrap()).entries().unwrap().count() > 0);
    let full = node.save(&[&web], fs_err::OpenOptions::new().write(true).open("/dev/full").unwrap()).await;
    assert!(full.unwrap_err().message().contains("No space left"));

    if rustix::process::geteuid().is_root() {
        let mounted = private.path("mnt");
        fs_err::create_dir(&mounted).unwrap();
        node.mount(&web, &mounted).await.unwrap();
        assert!(fs_err::read_dir(&mounted).unwrap().count() > 0);
        assert!(node.remove(pulled.image_ref.as_str(), false).await.is_err(), "it is in use");
        node.unmount(&mounted).await.unwrap();
    }
    node.remove("app:1", false).await.unwrap();
    assert_eq!(node.images().await.unwrap()[0].repo_tags, [web.as_str()]);
    let part = node.remove("web", false).await.unwrap_err();
    assert_eq!(part.kind(), ErrorKind::NotFound, "names are exact: {part}");
    node.remove(&web, false).await.unwrap();
    assert!(node.images().await.unwrap().is_empty());
    assert_eq!(node.load(&archive).await.unwrap(), [pulled.image_ref.as_str()]);
    let absent = node.load(&private.path("none.tar")).await.unwrap_err();
    assert!(absent.message().contains("none.tar"), "{absent}");
    node.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_another_ca_or_without_the_login_nothing_is_pulled() {
    let Some(private) = PrivateRegistry::start() else { return };
    let web = private.registry.image("shop/web:1");
    let other = CertificateRequest { extensions: &["basicConstraints=CA:TRUE"], ..Default::default() };
    let (ca, _) = other.make(private.dir.path(), "other").unwrap();
    let certs = private.path("other.d");
    let address = private.registry.address();
    fs_err::create_dir_all(certs.join(&address)).unwrap();
    let hosts = format!("server = \"https://{address}\"\nca = \"{}\"\n", ca.display());
    fs_err::write(certs.join(&address).join("hosts.toml"), hosts).unwrap();
    for (name, options) in [
        ("ca", LocalNodeOptions { certs_dirs: vec![certs], ..private.options() }),
        ("login", LocalNodeOptions { logins: [].into(), ..private.options() }),
    ] {
        let node = LocalNode::open_with(private.path(name), options).await.unwrap();
        let failed = node.ensure(&web).await.expect_err(name).to_string();
        assert!(!failed.contains(PASSWORD), "{failed}");
        node.close().await;
    }
    let relative = LocalNodeOptions { certs_dirs: vec!["certs.d".into()], ..LocalNodeOptions::default() };
    let refused = LocalNode::open_with(private.path("relative"), relative).await.err().unwrap();
    assert!(refused.message().contains("certs.d"), "{refused}");
}

/// Runs the example as its first lines say.
#[test]
fn the_example_pulls_with_a_private_ca_and_a_progress_bar() {
    let Some(private) = PrivateRegistry::start() else { return };
    let web = private.registry.image("shop/web:1");
    let deps = std::env::current_exe().unwrap();
    let example = deps.parent().and_then(|deps| deps.parent()).unwrap().join("examples/private_registry");
    let mut command = Command::new(example);
    command.arg(private.path("store")).arg(&web).arg(private.path("certs.d"));
    let password = private.dir.path().join("password");
    fs_err::write(&password, format!("{PASSWORD}\n")).unwrap();
    command.stdin(fs_err::File::open(password).unwrap().into_file());
    let run = command.args([&*private.registry.address(), USER]).output().unwrap();
    assert!(run.status.success(), "{run:?}");
    let text = String::from_utf8(run.stdout).unwrap();
    assert!(text.starts_with(&format!("{web} is sha256:")), "{text}");
}
