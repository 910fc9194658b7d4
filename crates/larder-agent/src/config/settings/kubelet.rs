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
            (<$form as SettingCodec>::name, <$form as SettingCodec>::KIND),
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

const NO_NODE_STATUS: &str = "larder writes no status of the node: kubelet does";

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
        "Pulls started at once before that limit bites; 0 is the default."
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
        "How many images may be pulled at once, at least 1; more than 1 only where `serializeImagePulls` is not true.",
        |config| config.images.max_parallel_image_pulls.map_or(Value::Null, |bound| KubeletIntCodec::print(&bound))
    )
    .default("`4`; none where pulls are serialised")
    .kubelet_has("no bound"),
    image_setting!(
        "imageMinimumGCAge",
        GoDurationCodec,
        image_minimum_gc_age,
        Live,
        "Spare images that were first seen less than this ago; 0 is the default."
    )
    .kubelet_flag("--minimum-image-ttl-duration"),
    image_setting!(
        "imageMaximumGCAge",
        GoDurationCodec,
        image_maximum_gc_age,
        Live,
        "Remove images unused for longer than this although there is room; 0 is never. Else above `imageMinimumGCAge`."
    ),
    image_setting!(
        "imageGCHighThresholdPercent",
        KubeletIntCodec,
        image_gc_high_threshold_percent,
        Live,
        "Collect when so many percent of the file system are in use; 100 is never."
    )
    .kubelet_flag("--image-gc-high-threshold"),
    image_setting!(
        "imageGCLowThresholdPercent",
        KubeletIntCodec,
        image_gc_low_threshold_percent,
        Live,
        "Free until so many percent are in use; below the high threshold."
    )
    .kubelet_flag("--image-gc-low-threshold"),
    image_setting!(
        "nodeStatusMaxImages",
        KubeletIntCodec,
        node_status_max_images,
        Live,
        "How many images the status of the node lists, the biggest first; -1 is all."
    )
    .kubelet_flag("--node-status-max-images")
    .idle(NO_NODE_STATUS),
    image_setting!(
        "runtimeRequestTimeout",
        GoDurationCodec,
        runtime_request_timeout,
        Restart,
        "How long a call to the runtime may take; 0 is the default. Pulls have `pull.timeout`."
    )
    .kubelet_flag("--runtime-request-timeout"),
    image_setting!(
        "containerRuntimeEndpoint",
        StringCodec,
        container_runtime_endpoint,
        Restart,
        "The socket of the container runtime, such as `unix:///run/containerd/containerd.sock`; used where `backend` is `cri`. Empty: the first socket that a runtime listens on where runtimes usually do."
    )
    .kubelet_flag("--container-runtime-endpoint")
    .kubelet_has("`unix:///run/containerd/containerd.sock`"),
    image_setting!(
        "imageServiceEndpoint",
        StringCodec,
        image_service_endpoint,
        Restart,
        "The socket of the runtime's image service; used where `backend` is `cri`. Empty: that of the runtime. Larder's own socket, which kubelet's file may name here, is passed over."
    )
    .kubelet_flag("--image-service-endpoint"),
    image_setting!(
        "imagePullCredentialsVerificationPolicy",
        StringCodec,
        image_pull_credentials_verification_policy,
        Live,
        "Which present images a pod may use only with credentials: `NeverVerify`, `NeverVerifyPreloadedImages`, `NeverVerifyAllowlistedImages`, `AlwaysVerify`."
    ),
    image_setting!(
        "preloadedImagesVerificationAllowlist",
        StringListCodec,
        preloaded_images_verification_allowlist,
        Live,
        "Images that need none under `NeverVerifyAllowlistedImages`: names without tag, or prefixes that end in `/*`."
    ),
    setting!(
        "imageCredentialProviderConfig",
        OptionalPathCodec,
        credential_plugins.config,
        Restart,
        "The file or folder that configures credential plugins; goes with `imageCredentialProviderBinDir`."
    )
    .kubelet_flag("--image-credential-provider-config"),
    setting!(
        "imageCredentialProviderBinDir",
        OptionalPathCodec,
        credential_plugins.bin_dir,
        Restart,
        "The folder of credential plugins; goes with `imageCredentialProviderConfig`."
    )
    .kubelet_flag("--image-credential-provider-bin-dir"),
    setting!(
        "staticPodPath",
        OptionalPathCodec,
        static_pod_path,
        Live,
        "A folder with manifests of pods: their images are ensured. Not taken from kubelet's file, since kubelet asks for those images itself."
    )
    .kubelet_flag("--pod-manifest-path"),
    setting!(
        "featureGates.KubeletEnsureSecretPulledImages",
        BoolCodec,
        gates.ensure_secret_pulled_images,
        Restart,
        "Whether present images may need credentials."
    )
    .of_kubelet(),
    setting!(
        "featureGates.CRIListStreaming",
        BoolCodec,
        runtime.list_streaming,
        Restart,
        "Ask the runtime for lists as streams."
    )
    .of_kubelet(),
    setting!(
        "featureGates.RuntimeClassInImageCriApi",
        BoolCodec,
        runtime.runtime_class_in_image,
        Restart,
        "Send and report runtime handlers of images."
    )
    .of_kubelet(),
];
