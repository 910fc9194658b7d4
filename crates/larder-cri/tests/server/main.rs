//! The server over a real socket: the contract of a backend through it, the codes of errors, deadlines, callers that
//! vanish, and clients that speak no gRPC.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod calls;
mod contract;
mod errors;
mod hostile;
mod world;
