"""What drafts gain: acceptance by position, and tokens a second against the same run without drafts."""
