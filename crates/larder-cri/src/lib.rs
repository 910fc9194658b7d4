//! CRI as a larder backend.
