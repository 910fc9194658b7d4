//! Settings that kubelet has, under kubelet's names.

use serde_json::Value;

use super::super::codecs::{
    BoolCodec, GoDurationCodec, KubeletIntCodec, OptionalPathCodec, SettingCodec, StringCodec,
    StringListCodec,
};
use super::{ReloadSupport, Setting, setting};

/// A field of kubelet's image settings.
macro_rules! image_setting {
    ($key:literal, $form:ty, $field:ident, $reload:ident, $about:literal) => {
        image_setting!($key, $form, $field, $reload, $about, |config| {
            <$form as SettingCodec>::print(&config.images.$field)
        })
    };
    ($key:literal, $form:ty, $field:ident, $reload:ident, $about:literal, $show:expr) => {
        Setting::new(
            $key,
            <$form as SettingCodec>::name,
            <$form as SettingCodec>::KIND,
            |draft, at| {
                draft.written.$field =
                    Some(<$form as SettingCodec>::parse(at).map_err(|problem| vec![problem])?);
                Ok(())
            },
            $show,
            ReloadSupport::$reload,
            $about,
        )
        .of_kubelet()
    };
}

pub(super) const SETTINGS: &[Setting] = &[
    image_setting!(
        "registryPullQPS",
        KubeletIntCodec,
        registry_pull_qps,
        Live,
        "Pulls started per second, on average; 0 is no limit."
    )
    .kubelet_flag("--registry-qps"),
    image_setting!(
        "registryBurst",
        KubeletIntCodec,
        registry_burst,
        Live,
        "Pulls that may start in one burst above `registryPullQPS`; 0 is the default."
    )
    .kubelet_flag("--registry-burst"),
    image_setting!("serializeImagePulls", BoolCodec, serialize_image_pulls, Live, "Pull one image at a time.")
        .kubelet_flag("--serialize-image-pulls")
        .kubelet_has("`true`, unless `maxParallelImagePulls` is above 1"),
    image_setting!(
        "maxParallelImagePulls",
        KubeletIntCodec,
        max_parallel_image_pulls,
        Live,
        "Limit of concurrent pulls, at least 1; above 1 only if `serializeImagePulls` is false. Only `ensure` and `pull` have a flag for it: `--max-parallel-image-pulls`.",
        |config| config.images.max_parallel_image_pulls.map_or(Value::Null, |bound| KubeletIntCodec::print(&bound))
    )
    .default("`4`; no limit if `serializeImagePulls` is true")
    .kubelet_has("no limit"),
    image_setting!(
        "imageMinimumGCAge",
        GoDurationCodec,
        image_minimum_gc_age,
        Live,
        "GC retains images that were first seen less than this ago; 0 is the default."
    )
    .kubelet_flag("--minimum-image-ttl-duration"),
    image_setting!(
        "imageMaximumGCAge",
        GoDurationCodec,
        image_maximum_gc_age,
        Live,
        "GC removes images unused for longer than this, whatever the disk usage; 0 is never. Otherwise above `imageMinimumGCAge`. Only `gc` and `explain` have a flag for it: `--image-maximum-gc-age`."
    ),
    image_setting!(
        "imageGCHighThresholdPercent",
        KubeletIntCodec,
        image_gc_high_threshold_percent,
        Live,
        "GC starts at this disk usage of the image filesystem, in percent; 100 is never."
    )
    .kubelet_flag("--image-gc-high-threshold"),
    image_setting!(
        "imageGCLowThresholdPercent",
        KubeletIntCodec,
        image_gc_low_threshold_percent,
        Live,
        "GC frees space down to this disk usage, in percent; below the high threshold."
    )
    .kubelet_flag("--image-gc-low-threshold"),
    image_setting!(
        "nodeStatusMaxImages",
        KubeletIntCodec,
        node_status_max_images,
        Live,
        "Number of images in the node status (`nodeImages` of `larder status -o json`), the largest first; -1 is all."
    )
    .kubelet_flag("--node-status-max-images"),
    image_setting!(
        "runtimeRequestTimeout",
        GoDurationCodec,
        runtime_request_timeout,
        Restart,
        "Timeout of a call to the runtime, except pulls (`pull.timeout`); 0 is the default."
    )
    .kubelet_flag("--runtime-request-timeout"),
    image_setting!(
        "containerRuntimeEndpoint",
        StringCodec,
        container_runtime_endpoint,
        Restart,
        "The socket of the container runtime, such as `unix:///run/containerd/containerd.sock`, for `backend: cri`. Empty: the first of the usual sockets that a runtime listens on."
    )
    .kubelet_flag("--container-runtime-endpoint")
    .kubelet_has("`unix:///run/containerd/containerd.sock`"),
    image_setting!(
        "imageServiceEndpoint",
        StringCodec,
        image_service_endpoint,
        Restart,
        "The socket of the runtime's image service, for `backend: cri`. Empty: `containerRuntimeEndpoint`. If kubelet's file names larder's own socket here, it is ignored."
    )
    .kubelet_flag("--image-service-endpoint"),
    image_setting!(
        "imagePullCredentialsVerificationPolicy",
        StringCodec,
        image_pull_credentials_verification_policy,
        Live,
        "For which present images a pod needs credentials: `NeverVerify`, `NeverVerifyPreloadedImages`, `NeverVerifyAllowlistedImages`, `AlwaysVerify`."
    ),
    image_setting!(
        "preloadedImagesVerificationAllowlist",
        StringListCodec,
        preloaded_images_verification_allowlist,
        Live,
        "Images that need no credentials under `NeverVerifyAllowlistedImages`: names without tag, or prefixes that end in `/*`."
    ),
    setting!(
        "imageCredentialProviderConfig",
        OptionalPathCodec,
        credential_plugins.config,
        Restart,
        "The file or directory that configures credential providers; requires `imageCredentialProviderBinDir`."
    )
    .kubelet_flag("--image-credential-provider-config"),
    setting!(
        "imageCredentialProviderBinDir",
        OptionalPathCodec,
        credential_plugins.bin_dir,
        Restart,
        "The directory of the credential provider binaries; requires `imageCredentialProviderConfig`."
    )
    .kubelet_flag("--image-credential-provider-bin-dir"),
    setting!(
        "staticPodPath",
        OptionalPathCodec,
        static_pod_path,
        Live,
        "A directory of static pod manifests, whose images are ensured. Not read from kubelet's file, since kubelet ensures those images itself."
    )
    .kubelet_flag("--pod-manifest-path"),
    setting!(
        "featureGates.KubeletEnsureSecretPulledImages",
        BoolCodec,
        gates.ensure_secret_pulled_images,
        Restart,
        "Verify credentials for present images, by `imagePullCredentialsVerificationPolicy`."
    )
    .of_kubelet(),
    setting!(
        "featureGates.CRIListStreaming",
        BoolCodec,
        runtime.list_streaming,
        Restart,
        "Request lists from the runtime as streams."
    )
    .of_kubelet(),
    setting!(
        "featureGates.RuntimeClassInImageCriApi",
        BoolCodec,
        runtime.runtime_class_in_image,
        Restart,
        "Send and report the runtime handlers of images."
    )
    .of_kubelet(),
];
