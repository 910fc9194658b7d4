//! Settings that are sound, contradict, come from several places, and make no sense.

mod effective;
mod errors;
mod properties;

use std::path::{Path, PathBuf};

use super::read::ConfigReader;
use super::{Config, ConfigErrors};
use crate::environment::DefaultPaths;

const HEAD: &str = "apiVersion: larder.dev/v1alpha1\nkind: LarderConfiguration\n";
const KUBELET_HEAD: &str = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";

fn places() -> DefaultPaths {
    DefaultPaths {
        root: Some("/root".into()),
        socket: Some("/run/larder.sock".into()),
        ..DefaultPaths::default()
    }
}

/// Reads the text of a whole file, named `c.yaml`.
fn read_whole(text: &str) -> Result<Config, ConfigErrors> {
    let mut reading = ConfigReader::new(&places());
    reading.take_text(Path::new("c.yaml"), text, false);
    reading.finish()
}

/// Reads settings, which begin on line 3.
fn read(settings: &str) -> Result<Config, ConfigErrors> {
    read_whole(&format!("{HEAD}{settings}"))
}

/// Reads settings of a file of kubelet's, named `k.yaml`, and then of one of larder's.
fn read_both(kubelet: &str, larder: &str) -> Result<Config, ConfigErrors> {
    let mut reading = ConfigReader::new(&places());
    reading.take_text(Path::new("k.yaml"), &format!("{KUBELET_HEAD}{kubelet}"), true);
    reading.take_text(Path::new("c.yaml"), &format!("{HEAD}{larder}"), false);
    reading.finish()
}

fn path(text: &str) -> PathBuf {
    PathBuf::from(text)
}
