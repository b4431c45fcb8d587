from support.small_tokenizers import tokenizer as tokenizer
