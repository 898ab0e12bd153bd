"""What learners on a GPU do, beside the limit or the peer that is measured in the same run."""
