"""What `moreh-ap plan` prints and draws: tables, sentences and pictures of plans."""
