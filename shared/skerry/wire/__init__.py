"""What goes over the wire: subjects, envelopes, records, payload codec."""
