//! Settings that kubelet has, under kubelet's names.

use super::super::codecs::{
    AbsolutePathCodec, BoolCodec, GoDurationCodec, KubeletIntCodec, ListCodec, OptionalCodec, SettingCodec,
    StringCodec,
};
use super::{ReloadSupport, Setting, settings};

settings! {
    SETTINGS:
    /// Pulls started per second, on average; 0 is no limit.
    "registryPullQPS": KubeletIntCodec => images.registry_pull_qps, Live, kubelet_flag("--registry-qps");

    /// Pulls that may start in one burst above `registryPullQPS`; 0 is the default.
    "registryBurst": KubeletIntCodec => images.registry_burst, Live, kubelet_flag("--registry-burst");

    /// Pull one image at a time.
    "serializeImagePulls": BoolCodec => images.serialize_image_pulls, Live, kubelet_flag("--serialize-image-pulls"),
        kubelet_has("`true`, unless `maxParallelImagePulls` is above 1");

    /// Limit of concurrent pulls, at least 1; above 1 only if `serializeImagePulls` is false. Only `ensure` and `pull`
    /// have a flag for it: `--max-parallel-image-pulls`.
    "maxParallelImagePulls": KubeletIntCodec => images.max_parallel_image_pulls, Live,
        default("`4`; no limit if `serializeImagePulls` is true"), kubelet_has("no limit");

    /// GC retains images that were first seen less than this ago; 0 is the default.
    "imageMinimumGCAge": GoDurationCodec => images.image_minimum_gc_age, Live,
        kubelet_flag("--minimum-image-ttl-duration");

    /// GC removes images unused for longer than this, whatever the disk usage; 0 is never. Otherwise above
    /// `imageMinimumGCAge`. Only `gc` and `explain` have a flag for it: `--image-maximum-gc-age`.
    "imageMaximumGCAge": GoDurationCodec => images.image_maximum_gc_age, Live;

    /// GC starts at this disk usage of the image filesystem, in percent; 100 is never.
    "imageGCHighThresholdPercent": KubeletIntCodec => images.image_gc_high_threshold_percent, Live,
        kubelet_flag("--image-gc-high-threshold");

    /// GC frees space down to this disk usage, in percent; below the high threshold.
    "imageGCLowThresholdPercent": KubeletIntCodec => images.image_gc_low_threshold_percent, Live,
        kubelet_flag("--image-gc-low-threshold");

    /// Number of images in the node status (`nodeImages` of `larder status -o json`), the largest first; -1 is all.
    "nodeStatusMaxImages": KubeletIntCodec => images.node_status_max_images, Live,
        kubelet_flag("--node-status-max-images");

    /// Timeout of a call to the runtime, except pulls (`pull.timeout`); 0 is the default.
    "runtimeRequestTimeout": GoDurationCodec => images.runtime_request_timeout, Restart,
        kubelet_flag("--runtime-request-timeout");

    /// The socket of the container runtime, such as `unix:///run/containerd/containerd.sock`, for `backend: cri`.
    /// Empty: the first of the usual sockets that a runtime listens on.
    "containerRuntimeEndpoint": StringCodec => images.container_runtime_endpoint, Restart,
        kubelet_flag("--container-runtime-endpoint"), kubelet_has("`unix:///run/containerd/containerd.sock`");

    /// The socket of the runtime's image service, for `backend: cri`. Empty: `containerRuntimeEndpoint`. If kubelet's
    /// file names larder's own socket here, it is ignored.
    "imageServiceEndpoint": StringCodec => images.image_service_endpoint, Restart,
        kubelet_flag("--image-service-endpoint");

    /// For which present images a pod needs credentials: `NeverVerify`, `NeverVerifyPreloadedImages`,
    /// `NeverVerifyAllowlistedImages`, `AlwaysVerify`.
    "imagePullCredentialsVerificationPolicy": StringCodec => images.image_pull_credentials_verification_policy, Live;

    /// Images that need no credentials under `NeverVerifyAllowlistedImages`: names without tag, or prefixes that end in
    /// `/*`.
    "preloadedImagesVerificationAllowlist": ListCodec<StringCodec> => images.preloaded_images_verification_allowlist, Live;

    /// The file or directory that configures credential providers; requires `imageCredentialProviderBinDir`.
    "imageCredentialProviderConfig": OptionalCodec<AbsolutePathCodec> => credential_plugins.config, Restart,
        kubelet_flag("--image-credential-provider-config");

    /// The directory of the credential provider binaries; requires `imageCredentialProviderConfig`.
    "imageCredentialProviderBinDir": OptionalCodec<AbsolutePathCodec> => credential_plugins.bin_dir, Restart,
        kubelet_flag("--image-credential-provider-bin-dir");

    /// A directory of static pod manifests, whose images are ensured. Not read from kubelet's file, since kubelet
    /// ensures those images itself.
    "staticPodPath": OptionalCodec<AbsolutePathCodec> => static_pod_path, Live, kubelet_flag("--pod-manifest-path");

    /// Verify credentials for present images, by `imagePullCredentialsVerificationPolicy`.
    "featureGates.KubeletEnsureSecretPulledImages": BoolCodec => gates.ensure_secret_pulled_images, Restart,
        of_kubelet();

    /// Request lists from the runtime as streams.
    "featureGates.CRIListStreaming": BoolCodec => runtime.list_streaming, Restart, of_kubelet();

    /// Send and report the runtime handlers of images.
    "featureGates.RuntimeClassInImageCriApi": BoolCodec => runtime.runtime_class_in_image, Restart, of_kubelet();
}
