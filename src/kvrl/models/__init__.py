"""Where models come from: `tiny` builds one from scratch, `fetch` finds, downloads and converts real ones."""
