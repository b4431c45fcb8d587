"""Made problems whose answers can be checked; the embedded model was trained on texts of the same makers."""
