"""The paper's application: a CSV file in, a sentence classifier out."""
