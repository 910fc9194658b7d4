//! How the rows of the terminal are divided.

use ratatui::layout::Size;

use super::App;

/// The smallest terminal on which the view is drawn, and takes keys: columns and rows.
pub(crate) const MIN_SIZE: Size = Size { width: 40, height: 12 };
/// Rows of disk, images, pulls and GC above the tabs.
pub(crate) const HEADER: u16 = 5;
/// Rows from which the images have the activity below them.
const TALL: u16 = 32;

/// Whether a terminal of this size shows only that it is too small.
pub(crate) fn is_too_small(size: Size) -> bool {
    size.width < MIN_SIZE.width || size.height < MIN_SIZE.height
}

impl App {
    /// Rows between the tabs and the two last rows.
    pub(crate) fn body_height(&self) -> usize {
        usize::from(self.size.height.saturating_sub(HEADER + 2))
    }

    /// Rows of images in view, without their heads.
    pub(crate) fn image_rows(&self) -> usize {
        (self.body_height() - self.activity_rows().min(self.body_height())).saturating_sub(1)
    }

    /// Rows of the activity below the images, with its head; on tall terminals, as long as there is any.
    pub(crate) fn activity_rows(&self) -> usize {
        let is_active = self.status.as_ref().is_some_and(|status| {
            !status.pulls.is_empty() || status.gc.as_ref().is_some_and(|gc| gc.round.is_some())
        });
        if self.size.height < TALL || !is_active { 0 } else { self.body_height() / 2 }
    }
}
