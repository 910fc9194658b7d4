//! Pod sandboxes and containers, run by a real runtime as kubelet does, on the host's network.

use prost::Message;
use tonic::Request;

use super::{Containerd, PeerResult, ask, call};
use crate::images::{ImageBuilder, LayerFiles};

/// A sandbox that runs; it ends when this is dropped, because its process is not one of containerd's.
#[derive(Debug)]
pub struct RunningPod<'a> {
    containerd: &'a Containerd,
    /// Id of the sandbox.
    pub id: String,
}

impl Containerd {
    /// Runs a sandbox `default/NAME` from the configured sandbox image.
    pub fn run_pod(&self, name: &str) -> PeerResult<RunningPod<'_>> {
        let request = RunPodSandbox { config: Some(sandbox(name)) };
        let RunPodSandboxAnswer { id } = ask(&self.endpoint(), RUN_POD, Request::new(request))?;
        Ok(RunningPod { containerd: self, id })
    }
}

const RUN_POD: &str = "/runtime.v1.RuntimeService/RunPodSandbox";
const STOP_POD: &str = "/runtime.v1.RuntimeService/StopPodSandbox";
const REMOVE_POD: &str = "/runtime.v1.RuntimeService/RemovePodSandbox";
const CREATE: &str = "/runtime.v1.RuntimeService/CreateContainer";
const START: &str = "/runtime.v1.RuntimeService/StartContainer";
const STOP: &str = "/runtime.v1.RuntimeService/StopContainer";

impl RunningPod<'_> {
    /// Starts a container of this image, and stops it. Returns its id.
    pub fn run_and_stop(&self, name: &str, image: &str, labels: &[(&str, &str)]) -> PeerResult<String> {
        let id = self.run(name, image, labels)?;
        call(&self.containerd.endpoint(), STOP, Request::new(ContainerId { id: id.clone() }))?;
        Ok(id)
    }

    /// Starts a container of this image. Returns its id.
    pub fn run(&self, name: &str, image: &str, labels: &[(&str, &str)]) -> PeerResult<String> {
        let endpoint = self.containerd.endpoint();
        let config = ContainerConfig {
            metadata: Some(ContainerMetadata { name: name.to_owned() }),
            image: Some(ImageSpec { image: image.to_owned() }),
            labels: labels.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect(),
        };
        let pod = self.id.clone();
        let create = CreateContainer { pod, config: Some(config), sandbox: Some(sandbox("pod")) };
        let ContainerId { id } = ask(&endpoint, CREATE, Request::new(create))?;
        call(&endpoint, START, Request::new(ContainerId { id: id.clone() }))?;
        Ok(id)
    }
}

impl Drop for RunningPod<'_> {
    fn drop(&mut self) {
        for method in [STOP_POD, REMOVE_POD] {
            if let Err(error) =
                call(&self.containerd.endpoint(), method, Request::new(PodId { id: self.id.clone() }))
            {
                eprintln!("{error}");
            }
        }
    }
}

/// An image whose program waits forever, as `/pause` of the usual sandbox image does.
pub fn pause_image() -> ImageBuilder {
    ImageBuilder::new().layer(LayerFiles::new().file("bin/true", pause_program()))
}

/// The smallest program for Linux that calls `pause()` again and again.
fn pause_program() -> Vec<u8> {
    let (machine, code): (u16, Vec<u8>) = if cfg!(target_arch = "aarch64") {
        // ppoll(NULL, 0, NULL, NULL): there is no pause().
        let words: [u32; 7] =
            [0xd280_0000, 0xd280_0001, 0xd280_0002, 0xd280_0003, 0xd280_0928, 0xd400_0001, 0x17ff_fffb];
        (183, words.map(u32::to_le_bytes).concat())
    } else {
        (62, vec![0xb8, 0x22, 0, 0, 0, 0x0f, 0x05, 0xeb, 0xf7])
    };
    let (base, headers) = (0x40_0000_u64, 64 + 56_u64);
    let size = headers + code.len() as u64;
    let mut program = b"\x7fELF\x02\x01\x01".to_vec();
    program.resize(16, 0);
    program.extend([2_u16, machine].map(u16::to_le_bytes).concat());
    program.extend(1_u32.to_le_bytes());
    program.extend([base + headers, 64, 0].map(u64::to_le_bytes).concat());
    program.extend(0_u32.to_le_bytes());
    program.extend([64_u16, 56, 1, 0, 0, 0].map(u16::to_le_bytes).concat());
    program.extend([1_u32, 5].map(u32::to_le_bytes).concat());
    program.extend([0, base, base, size, size, 0x1000].map(u64::to_le_bytes).concat());
    program.extend(code);
    program
}

fn sandbox(name: &str) -> SandboxConfig {
    let label = |key: &str, value: &str| (format!("io.kubernetes.pod.{key}"), value.to_owned());
    SandboxConfig {
        metadata: Some(SandboxMetadata {
            name: name.to_owned(),
            uid: format!("uid-{name}"),
            namespace: "default".to_owned(),
        }),
        labels: [label("name", name), label("namespace", "default")].into(),
        linux: Some(LinuxSandbox {
            security: Some(Security { namespaces: Some(Namespaces { network: HOST }) }),
        }),
    }
}

/// `NODE` of `NamespaceMode`.
const HOST: i32 = 2;

#[derive(Clone, PartialEq, Message)]
struct RunPodSandbox {
    #[prost(message, optional, tag = "1")]
    config: Option<SandboxConfig>,
}

#[derive(Clone, PartialEq, Message)]
struct RunPodSandboxAnswer {
    #[prost(string, tag = "1")]
    id: String,
}

#[derive(Clone, PartialEq, Message)]
struct PodId {
    #[prost(string, tag = "1")]
    id: String,
}

#[derive(Clone, PartialEq, Message)]
struct SandboxConfig {
    #[prost(message, optional, tag = "1")]
    metadata: Option<SandboxMetadata>,
    #[prost(btree_map = "string, string", tag = "6")]
    labels: std::collections::BTreeMap<String, String>,
    #[prost(message, optional, tag = "8")]
    linux: Option<LinuxSandbox>,
}

#[derive(Clone, PartialEq, Message)]
struct SandboxMetadata {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    uid: String,
    #[prost(string, tag = "3")]
    namespace: String,
}

#[derive(Clone, PartialEq, Message)]
struct LinuxSandbox {
    #[prost(message, optional, tag = "2")]
    security: Option<Security>,
}

#[derive(Clone, PartialEq, Message)]
struct Security {
    #[prost(message, optional, tag = "1")]
    namespaces: Option<Namespaces>,
}

#[derive(Clone, PartialEq, Message)]
struct Namespaces {
    #[prost(int32, tag = "1")]
    network: i32,
}

#[derive(Clone, PartialEq, Message)]
struct CreateContainer {
    #[prost(string, tag = "1")]
    pod: String,
    #[prost(message, optional, tag = "2")]
    config: Option<ContainerConfig>,
    #[prost(message, optional, tag = "3")]
    sandbox: Option<SandboxConfig>,
}

#[derive(Clone, PartialEq, Message)]
struct ContainerConfig {
    #[prost(message, optional, tag = "1")]
    metadata: Option<ContainerMetadata>,
    #[prost(message, optional, tag = "2")]
    image: Option<ImageSpec>,
    #[prost(btree_map = "string, string", tag = "9")]
    labels: std::collections::BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
struct ContainerMetadata {
    #[prost(string, tag = "1")]
    name: String,
}

#[derive(Clone, PartialEq, Message)]
struct ImageSpec {
    #[prost(string, tag = "1")]
    image: String,
}

#[derive(Clone, PartialEq, Message)]
struct ContainerId {
    #[prost(string, tag = "1")]
    id: String,
}
