//! Layers unpacked from archives of all kinds: good ones, hostile ones, and those that only other layers complete.

mod forms;
mod hostile;
mod oracle;
mod settling;
mod support;
mod trees;
mod verifying;
