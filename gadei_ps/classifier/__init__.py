"""The application of GaDei: a CSV file in, a sentence classifier out."""
