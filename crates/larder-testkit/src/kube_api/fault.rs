//! Faults of the API server, and the requests that they apply to.

use std::time::Duration;

/// A fault of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ApiFault {
    /// Another status and its reason, such as 500 and `InternalError`.
    Status(u16, &'static str),
    /// 429, with these seconds in `Retry-After`.
    Throttle(u32),
    /// The answer comes only after this time.
    Delay(Duration),
    /// The connection is closed without an answer.
    Hangup,
}

/// A fault of requests whose `METHOD PATH` contains a text.
#[derive(Debug)]
pub(super) struct InjectedFault {
    part: String,
    left: usize,
    fault: ApiFault,
}

impl InjectedFault {
    pub(super) fn new(part: &str, times: usize, fault: ApiFault) -> InjectedFault {
        InjectedFault { part: part.to_owned(), left: times, fault }
    }
}

/// The first fault that applies to a request.
pub(super) fn choose(faults: &mut [InjectedFault], request: &str) -> Option<ApiFault> {
    let chosen = faults.iter_mut().find(|fault| fault.left > 0 && request.contains(&fault.part))?;
    chosen.left -= 1;
    Some(chosen.fault.clone())
}
