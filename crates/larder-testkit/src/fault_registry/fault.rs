//! Faults, and the requests that they apply to.

use std::ops::RangeInclusive;
use std::time::Duration;

/// A fault of a response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ResponseFault {
    /// Another status, with these header fields and this body.
    Status(u16, Vec<(String, String)>, String),
    /// The status, with `Retry-After`.
    RetryAfter(u16, String),
    /// The connection is reset after so many bytes of the body (0: after the headers).
    ResetAfter(u64),
    /// The connection is closed in good order after so many bytes of the body.
    CloseAfter(u64),
    /// So many bytes of the body are sent, in good order, as if that were all of it.
    Truncate(u64),
    /// The first byte of the body is another one.
    Corrupt,
    /// The body is so many bytes longer than the content, without Content-Length.
    Overlong(u64),
    /// So many bytes at a time, with a pause after each.
    Trickle(u64, Duration),
    /// After so many bytes of the body the response stalls, and the connection is kept open.
    StallAfter(u64),
    /// The headers come only after this time.
    SlowHeaders(Duration),
    /// The `Range` of the request is ignored.
    IgnoreRange,
    /// `Content-Range` of the answer says this.
    ContentRange(String),
    /// A redirect to another place.
    Redirect(String),
    /// The connection is reset before anything is answered.
    Hangup,
}

impl ResponseFault {
    /// A status without further explanation.
    pub fn status(status: u16) -> ResponseFault {
        ResponseFault::Status(status, Vec::new(), String::new())
    }
}

/// Which requests a fault concerns: those whose path contains a text, and of these all, or some by their number.
#[derive(Debug, Clone)]
pub struct FaultTrigger {
    part: String,
    nth: RangeInclusive<usize>,
    ranged: bool,
    from: Option<u64>,
}

impl FaultTrigger {
    /// Requests whose path and query contain `part`.
    pub fn path(part: impl Into<String>) -> FaultTrigger {
        FaultTrigger { part: part.into(), nth: 1..=usize::MAX, ranged: false, from: None }
    }

    /// Only the first, second, ... of them, counted from when the rule was given.
    #[must_use]
    pub fn nth(mut self, nth: RangeInclusive<usize>) -> FaultTrigger {
        self.nth = nth;
        self
    }

    /// Only the first of them.
    #[must_use]
    pub fn once(self) -> FaultTrigger {
        self.nth(1..=1)
    }

    /// Only those that ask for a range.
    #[must_use]
    pub fn ranged(mut self) -> FaultTrigger {
        self.ranged = true;
        self
    }

    /// Only those that ask for a range from this byte.
    #[must_use]
    pub fn from(self, byte: u64) -> FaultTrigger {
        FaultTrigger { from: Some(byte), ..self.ranged() }
    }
}

#[derive(Debug)]
pub(super) struct InjectedFault {
    on: FaultTrigger,
    fault: ResponseFault,
    seen: usize,
}

impl InjectedFault {
    pub(super) fn new(on: FaultTrigger, fault: ResponseFault) -> InjectedFault {
        InjectedFault { on, fault, seen: 0 }
    }

    /// Returns the fault of this rule for a request.
    fn apply(&mut self, path: &str, range: Option<u64>) -> Option<ResponseFault> {
        let is_elsewhere = self.on.from.is_some_and(|from| range != Some(from));
        if !path.contains(&self.on.part) || (self.on.ranged && range.is_none()) || is_elsewhere {
            return None;
        }
        self.seen += 1;
        self.on.nth.contains(&self.seen).then(|| self.fault.clone())
    }
}

/// Every rule counts the request, and the first that acts on it is taken. `range` is where the range begins that it
/// asks for.
pub(super) fn choose(rules: &mut [InjectedFault], path: &str, range: Option<u64>) -> Option<ResponseFault> {
    let mut chosen = None;
    for rule in rules {
        let fault = rule.apply(path, range);
        chosen = chosen.or(fault);
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_acts_on_the_requests_it_names_and_on_no_other() {
        let mut rules = [
            InjectedFault::new(FaultTrigger::path("/blobs/").nth(2..=3), ResponseFault::Hangup),
            InjectedFault::new(FaultTrigger::path("/").ranged(), ResponseFault::Corrupt),
        ];
        let mut asked = |path: &str, range| choose(&mut rules, path, range);
        assert_eq!(asked("/v2/a/blobs/x", None), None);
        assert_eq!(asked("/v2/a/manifests/x", None), None);
        assert_eq!(asked("/v2/a/blobs/x", Some(7)), Some(ResponseFault::Hangup));
        assert_eq!(asked("/v2/a/blobs/x", None), Some(ResponseFault::Hangup));
        assert_eq!(asked("/v2/a/blobs/x", Some(7)), Some(ResponseFault::Corrupt));
    }
}
