"""Sites against SFVI, SFVI-Avg, meta-analysis and pooled NUTS: accuracy and communication."""
