"""What an answer must look like: from a request's word for it to a grammar that has been tried."""
