//! The trace that a command is part of, as its environment says.

use larder::trace_context::{TraceHeaders, set_source};

use crate::environment::variable;

/// The variables in which programs pass a trace context to those that they start, and the fields that they stand for.
const VARIABLES: [(&str, &str); 3] =
    [("TRACEPARENT", "traceparent"), ("TRACESTATE", "tracestate"), ("BAGGAGE", "baggage")];

/// Lets calls of this process, to a daemon or to a runtime and registries, be part of the trace that the environment
/// names.
pub fn continue_from_environment() {
    set_source(|| headers(&variable));
}

fn headers(variable: &dyn Fn(&str) -> Option<String>) -> TraceHeaders {
    let fields = VARIABLES.iter().filter_map(|(name, field)| Some((*field, variable(name)?)));
    let fields: TraceHeaders = fields.collect();
    // The others mean nothing without it.
    if fields.iter().any(|(name, _)| *name == "traceparent") { fields } else { Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_continued_if_the_environment_names_one() {
        let of = |set: &'static [&str]| headers(&|name| set.contains(&name).then(|| format!("of {name}")));
        assert_eq!(of(&["TRACESTATE", "BAGGAGE"]), []);
        let fields = [("traceparent", "of TRACEPARENT"), ("baggage", "of BAGGAGE")];
        assert_eq!(of(&["TRACEPARENT", "BAGGAGE"]), fields.map(|(name, value)| (name, value.to_owned())));
    }
}
