//! The formats in which metrics are served: `OpenMetrics`, and the text format that tools without it read. Pure.

use std::fmt::Write as _;

use tonic::codegen::http::{HeaderMap, header};

/// The prefix of kubelet's metrics.
pub(super) const KUBELET_PREFIX: &str = "kubelet_";

/// A format of metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExpositionFormat {
    /// `OpenMetrics` 1.0, for clients that accept it.
    OpenMetrics,
    /// The Prometheus text format 0.0.4, for all others.
    Text,
}

impl ExpositionFormat {
    /// The format for a request.
    pub(crate) fn accepted(headers: &HeaderMap) -> ExpositionFormat {
        let accepts = |value: &str| {
            value.split(',').any(|kind| kind.trim().starts_with("application/openmetrics-text"))
        };
        let values = headers.get_all(header::ACCEPT).iter();
        if values.filter_map(|value| value.to_str().ok()).any(accepts) {
            ExpositionFormat::OpenMetrics
        } else {
            ExpositionFormat::Text
        }
    }

    /// The `Content-Type` of a response.
    pub(crate) const fn content_type(self) -> &'static str {
        match self {
            ExpositionFormat::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            ExpositionFormat::Text => "text/plain; version=0.0.4; charset=utf-8",
        }
    }

    /// A page of `OpenMetrics` in this format. In the text format, the header lines of a counter name its samples,
    /// which end in `_total`, and buckets have no exemplars.
    pub(super) fn of_open_metrics(self, page: String) -> String {
        if self == ExpositionFormat::OpenMetrics {
            return page;
        }
        let (mut text, mut help) = (String::with_capacity(page.len()), "");
        for line in page.lines() {
            let mut words = line.splitn(4, ' ');
            match (words.next(), words.next(), words.next(), words.next()) {
                (Some("#"), Some("HELP"), Some(_), _) => help = line,
                (Some("#"), Some("TYPE"), Some(name), Some(kind)) => {
                    let suffix = if kind == "counter" { "_total" } else { "" };
                    let help = help.strip_prefix("# HELP ").and_then(|help| help.split_once(' '));
                    if let Some((_, help)) = help {
                        let _ = writeln!(text, "# HELP {name}{suffix} {help}");
                    }
                    let _ = writeln!(text, "# TYPE {name}{suffix} {kind}");
                }
                (Some("#"), ..) => {}
                _ => {
                    text.push_str(without_exemplar(line));
                    text.push('\n');
                }
            }
        }
        text
    }
}

/// A sample without its exemplar, which only buckets have.
fn without_exemplar(sample: &str) -> &str {
    match sample.rsplit_once(" # {") {
        Some((bucket, _)) if sample.contains("_bucket{") => bucket,
        _ => sample,
    }
}

/// A page of `OpenMetrics` with larder's prefix instead of kubelet's.
pub(super) fn with_own_names(page: &str) -> String {
    let mut renamed = String::with_capacity(page.len());
    for line in page.lines() {
        let (head, rest) = ["# HELP ", "# TYPE ", "# UNIT ", ""]
            .iter()
            .find_map(|head| Some((*head, line.strip_prefix(head)?)))
            .unwrap_or(("", line));
        let rest = rest
            .strip_prefix(KUBELET_PREFIX)
            .map_or_else(|| rest.to_owned(), |name| format!("larder_{name}"));
        // Writing to a `String` does not fail.
        let _ = writeln!(renamed, "{head}{rest}");
    }
    renamed
}

#[cfg(test)]
mod tests {
    use super::*;
    use tonic::codegen::http::HeaderValue;

    #[test]
    fn only_clients_that_accept_open_metrics_get_it() {
        let accepted = |value: &str| {
            let headers = [(header::ACCEPT, HeaderValue::from_str(value).unwrap())].into_iter().collect();
            ExpositionFormat::accepted(&headers)
        };
        let prometheus =
            "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.4,*/*;q=0.1";
        assert_eq!(accepted(prometheus), ExpositionFormat::OpenMetrics);
        for value in ["text/plain", "*/*", ""] {
            assert_eq!(accepted(value), ExpositionFormat::Text, "{value}");
        }
    }

    #[test]
    fn only_names_of_metrics_are_renamed() {
        let page = "# HELP kubelet_a Of kubelet_a.\n# TYPE kubelet_a counter\nkubelet_a_total{x=\"kubelet_b\"} 3\n\
                    # HELP b Help.\n# TYPE b gauge\nb 4\n# EOF\n";
        assert_eq!(
            with_own_names(page),
            "# HELP larder_a Of kubelet_a.\n# TYPE larder_a counter\nlarder_a_total{x=\"kubelet_b\"} 3\n\
             # HELP b Help.\n# TYPE b gauge\nb 4\n# EOF\n"
        );
    }

    #[test]
    fn the_text_format_names_the_samples_of_a_counter() {
        let page = "# HELP a Help of a.\n# TYPE a counter\na_total{x=\"1 # {2\"} 3\n# HELP b Help.\n# TYPE b gauge\n\
                    # UNIT b seconds\nb 4\nc_bucket{le=\"1.0\"} 1 # {trace_id=\"5b\"} 0.5 12.25\n# EOF\n";
        assert_eq!(
            ExpositionFormat::Text.of_open_metrics(page.to_owned()),
            "# HELP a_total Help of a.\n# TYPE a_total counter\na_total{x=\"1 # {2\"} 3\n# HELP b Help.\n\
             # TYPE b gauge\nb 4\nc_bucket{le=\"1.0\"} 1\n"
        );
        assert_eq!(ExpositionFormat::OpenMetrics.of_open_metrics(page.to_owned()), page);
    }
}
