"""A whole cluster in one process under virtual time: thousands of fault schedules in minutes."""
