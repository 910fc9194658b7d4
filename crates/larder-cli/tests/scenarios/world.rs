//! Parts of a scenario: servers, a home without credentials, and larder to run.

mod running;

use std::fs::Permissions;
use std::io::PipeWriter;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use larder_store::store::{Store, StoreConfig};
use larder_testkit::private_state::assert_private;
use larder_testkit_peers::registry::AccessLogLine;
use larder_testkit_peers::{
    Availability, Containerd, Dockerd, HoldingProxy, Package, RegistryOptions, RegistryProcess, require,
};
use serde_json::json;
use tempfile::TempDir;

pub(crate) use running::{LarderOutput, LarderProcess, larder_in};

/// A containerd, a Docker Engine, or larder's own store, that knows a registry, both empty.
pub(crate) struct RuntimeFixture {
    containerd: Option<Containerd>,
    docker: Option<Dockerd>,
    pub(crate) registry: RegistryProcess,
    home: TempDir,
}

impl RuntimeFixture {
    /// `None`, after a loud message, where real servers are not installed and this is not CI.
    pub(crate) fn new(options: RegistryOptions) -> Option<RuntimeFixture> {
        match require(&Package::ALL) {
            Availability::Skip(_) => return None,
            Availability::Available => {}
        }
        let registry = RegistryProcess::start(options).unwrap();
        let containerd = Containerd::start().unwrap();
        containerd.add_registry(&registry).unwrap();
        let home = tempfile::tempdir().unwrap();
        Some(RuntimeFixture { containerd: Some(containerd), docker: None, registry, home })
    }

    /// With a Docker Engine in place of a runtime. It connects to registries on loopback without configuration.
    pub(crate) fn with_docker(options: RegistryOptions) -> Option<RuntimeFixture> {
        if !require(&[Package::DockerIo, Package::DockerRegistry, Package::Skopeo]).is_available() {
            return None;
        }
        let registry = RegistryProcess::start(options).unwrap();
        let docker = Some(Dockerd::start().unwrap());
        Some(RuntimeFixture { containerd: None, docker, registry, home: tempfile::tempdir().unwrap() })
    }

    /// With larder's own store in place of a runtime.
    pub(crate) fn with_store(options: RegistryOptions) -> Option<RuntimeFixture> {
        if !require(&[Package::DockerRegistry, Package::Skopeo]).is_available() {
            return None;
        }
        let registry = RegistryProcess::start(options).unwrap();
        let world =
            RuntimeFixture { containerd: None, docker: None, registry, home: tempfile::tempdir().unwrap() };
        fs_err::create_dir(world.certs_d()).unwrap();
        drop(Store::open(&world.place(), StoreConfig::default()).unwrap()); // commands that look make none
        Some(world)
    }

    /// One world of each backend, one after the other: what a user sees is the same.
    pub(crate) fn of_each_backend(options: RegistryOptions) -> impl Iterator<Item = RuntimeFixture> {
        ["containerd", "larder's own store", "Docker"].into_iter().filter_map(move |backend| {
            eprintln!("with {backend}:");
            match backend {
                "containerd" => RuntimeFixture::new(options),
                "Docker" => RuntimeFixture::with_docker(options),
                _ => RuntimeFixture::with_store(options),
            }
        })
    }

    /// One world of each backend that is a process of its own.
    pub(crate) fn of_each_runtime(options: RegistryOptions) -> impl Iterator<Item = RuntimeFixture> {
        RuntimeFixture::of_each_backend(options).filter(|world| world.endpoint().is_some())
    }

    /// With a registry without TLS and authentication.
    pub(crate) fn plain() -> Option<RuntimeFixture> {
        RuntimeFixture::new(RegistryOptions::default())
    }

    /// The containerd of a world that has one.
    #[track_caller]
    pub(crate) fn containerd(&self) -> &Containerd {
        self.containerd.as_ref().expect("a world with containerd")
    }

    #[track_caller]
    pub(crate) fn containerd_mut(&mut self) -> &mut Containerd {
        self.containerd.as_mut().expect("a world with containerd")
    }

    /// Prints the backend how to reach a registry: plain HTTP, or TLS with the registry's own authority.
    pub(crate) fn knows(&self, registry: &RegistryProcess) {
        self.knows_at(&registry.address(), registry.scheme(), registry.ca());
    }

    /// Configures anything that serves at `address`.
    pub(crate) fn knows_at(&self, address: &str, scheme: &str, ca: Option<&Path>) {
        if let Some(containerd) = &self.containerd {
            return containerd.knows_at(address, scheme, ca).unwrap();
        }
        if self.docker.is_some() {
            return;
        }
        let dir = self.certs_d().join(address);
        let ca = ca.map_or_else(String::new, |ca| format!("ca = \"{}\"\n", ca.display()));
        fs_err::create_dir_all(&dir).unwrap();
        fs_err::write(dir.join("hosts.toml"), format!("server = \"{scheme}://{address}\"\n{ca}")).unwrap();
    }

    /// Where the store finds how to reach registries.
    fn certs_d(&self) -> PathBuf {
        self.home.path().join("certs.d")
    }

    /// A gate in front of the registry, which the backend knows how to reach.
    pub(crate) fn gate(&self) -> HoldingProxy {
        let gate = HoldingProxy::for_registry(self.registry.port()).unwrap();
        if let Some(containerd) = &self.containerd {
            containerd.knows_at(&gate.address(), "http", None).unwrap();
        }
        gate
    }

    /// Where the backend keeps images.
    pub(crate) fn place(&self) -> PathBuf {
        match (&self.containerd, &self.docker) {
            (Some(containerd), _) => containerd.socket().with_file_name("root"),
            (None, Some(docker)) => docker.root().to_owned(),
            (None, None) => self.home.path().join("store"),
        }
    }

    /// Requests of pulls at the registry. In front of containerd on a nearly full disk, larder requests more, for the
    /// sizes of images.
    pub(crate) fn pull_requests(&self) -> Vec<AccessLogLine> {
        let is_of_pull =
            |request: &AccessLogLine| !(self.has_containerd() && request.user_agent.starts_with("larder"));
        self.registry.requests().into_iter().filter(is_of_pull).collect()
    }

    pub(crate) fn has_containerd(&self) -> bool {
        self.containerd.is_some()
    }

    pub(crate) fn has_docker(&self) -> bool {
        self.docker.is_some()
    }

    /// The engine of a world that has one.
    #[track_caller]
    pub(crate) fn docker(&self) -> &Dockerd {
        self.docker.as_ref().expect("a world with Docker")
    }

    /// Where the runtime or engine is, as `--backend` takes it; `None` for larder's own store.
    pub(crate) fn endpoint(&self) -> Option<String> {
        let docker = || Some(format!("docker://{}", self.docker.as_ref()?.socket().display()));
        self.containerd.as_ref().map(Containerd::endpoint).or_else(docker)
    }

    /// The path of the socket of the runtime or engine.
    #[track_caller]
    pub(crate) fn socket(&self) -> String {
        let endpoint = self.endpoint().expect("a world with a runtime");
        endpoint.split_once("://").map(|(_, path)| path.to_owned()).expect("a socket")
    }

    /// Ends the backend's own process, if it has one.
    pub(crate) fn stop_backend(&mut self) {
        self.containerd.iter_mut().for_each(Containerd::stop);
        self.docker.iter_mut().for_each(Dockerd::stop);
    }

    /// Starts it again.
    pub(crate) fn start_backend_again(&mut self) {
        self.containerd.iter_mut().for_each(|containerd| containerd.start_again().unwrap());
        self.docker.iter_mut().for_each(|docker| docker.start_again().unwrap());
    }

    /// A path in a directory that only this test sees.
    pub(crate) fn path(&self, name: &str) -> String {
        self.home.path().join(name).to_string_lossy().into_owned()
    }

    /// Writes a file into a directory that only this test sees, and returns its path.
    pub(crate) fn file(&self, name: &str, content: &str) -> String {
        let path = self.home.path().join(name);
        fs_err::write(&path, content).unwrap();
        path.to_string_lossy().into_owned()
    }

    /// Writes a program that only this test sees, and returns its path.
    pub(crate) fn program(&self, name: &str, script: &str) -> String {
        fs_err::create_dir_all(self.home.path().join(name).parent().unwrap()).unwrap();
        let path = self.file(name, &format!("#!/bin/sh\n{script}\n"));
        fs_err::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        path
    }

    /// Runs larder to its end, against this world's backend.
    pub(crate) fn larder(&self, arguments: &[&str]) -> LarderOutput {
        self.start_larder(arguments).finish()
    }

    /// Runs larder with a file as its standard input.
    pub(crate) fn larder_reading(&self, arguments: &[&str], file: &str) -> LarderOutput {
        let input = fs_err::File::open(file).unwrap().into_parts().0;
        LarderProcess::reading(self.command(arguments), input.into()).finish()
    }

    /// Starts larder and lets it run.
    pub(crate) fn start_larder(&self, arguments: &[&str]) -> LarderProcess {
        LarderProcess::start(self.command(arguments))
    }

    /// Runs larder to its end with this file of settings.
    pub(crate) fn larder_with(&self, settings: &str, arguments: &[&str]) -> LarderOutput {
        let mut command = self.command(arguments);
        command.env("LARDER_CONFIG", settings);
        LarderProcess::start(command).finish()
    }

    /// Starts larder with this pipe for its standard output.
    pub(crate) fn larder_into(&self, arguments: &[&str], output: PipeWriter) -> Child {
        self.command(arguments).stdin(Stdio::null()).stdout(output).stderr(Stdio::null()).spawn().unwrap()
    }

    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = larder_in(self.home.path());
        // Where a test puts its credential helpers.
        let path = std::env::var_os("PATH").unwrap_or_default();
        command.env("PATH", format!("{}:{}", self.path("helpers"), path.to_string_lossy()));
        match self.endpoint() {
            Some(endpoint) if arguments.contains(&"--state") => command.env("LARDER_BACKEND", endpoint),
            Some(endpoint) => command.env("LARDER_BACKEND", endpoint).arg("--state").arg(self.path("state")),
            None => command.arg("--root").arg(self.place()).arg("--certs-d").arg(self.certs_d()),
        };
        command.args(arguments);
        command
    }

    /// Names with tags of the backend's images, listed without larder, sorted.
    pub(crate) fn images(&self) -> Vec<String> {
        let mut names = self.image_names();
        names.retain(|name| !name.contains('@'));
        names
    }

    /// All names of the images that the backend has, with tags and with digests, sorted.
    pub(crate) fn image_names(&self) -> Vec<String> {
        let mut names = match (&self.containerd, &self.docker) {
            (Some(containerd), _) => names_in_containerd(containerd),
            (None, Some(docker)) => docker.image_names().unwrap(),
            (None, None) => names_in_store(&self.place()),
        };
        names.sort();
        names
    }

    /// As if what was ensured had been ensured long ago.
    pub(crate) fn end_leases(&self) {
        if self.endpoint().is_some() {
            return end_leases(Path::new(&self.path("state")));
        }
        end_leases(&self.place().join("collect"));
    }

    /// Forgets all images, as if larder had never run.
    pub(crate) fn remove_images(&self) {
        let images = self.image_names();
        if !images.is_empty() {
            let names: Vec<&str> = images.iter().map(String::as_str).collect();
            let run = self.larder(&[&["rm", "--ignore-not-found"], names.as_slice()].concat());
            assert_eq!(run.code, 0, "{run:?}");
        }
        assert_eq!(self.image_names(), [""; 0]);
    }
}

impl Drop for RuntimeFixture {
    fn drop(&mut self) {
        if self.endpoint().is_some() {
            assert_private(Path::new(&self.socket()));
        }
    }
}

fn names_in_containerd(containerd: &Containerd) -> Vec<String> {
    let lines = containerd.ctr("k8s.io", &["images", "ls", "-q"]).unwrap();
    // containerd keeps a record under each image's id as well.
    lines.lines().filter(|name| !name.starts_with("sha256:")).map(str::to_owned).collect()
}

/// Opened for this look alone: one process has a store at a time.
fn names_in_store(root: &Path) -> Vec<String> {
    let store = Store::open(root, StoreConfig::default()).unwrap();
    store.images().unwrap().into_iter().flat_map(|image| [image.tags, image.digests].concat()).collect()
}

/// Ends the leases in this state directory.
pub(crate) fn end_leases(state: &Path) {
    fs_err::remove_file(state.join("leases.json")).unwrap();
}

/// A manifest of a pod with containers of these images; an empty policy is none.
pub(crate) fn pod(name: &str, policy: &str, images: &[&str]) -> String {
    pod_with_secrets(name, policy, images, &[])
}

/// A manifest of a pod that names pull secrets. JSON is YAML, too.
pub(crate) fn pod_with_secrets(name: &str, policy: &str, images: &[&str], secrets: &[&str]) -> String {
    let containers = images.iter().enumerate().map(|(number, image)| {
        let mut container = json!({"name": format!("c{number}"), "image": image});
        if !policy.is_empty() {
            container["imagePullPolicy"] = json!(policy);
        }
        container
    });
    let spec = json!({
        "containers": containers.collect::<Vec<_>>(),
        "imagePullSecrets": secrets.iter().map(|name| json!({"name": name})).collect::<Vec<_>>(),
    });
    let metadata = json!({"name": name, "uid": format!("{name}-uid")});
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}).to_string() + "\n---\n"
}
