"""Chat templates like those of common checkpoints."""

CHATML = """\
{% for message in messages %}
{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA_3 = """\
{{- bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{% set date_string = strftime_now("%d %b") %}{% endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.get("tool_calls")) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, roles must alternate user/assistant") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {%- generation %}{{- " " + message["content"]|trim + eos_token }}{% endgeneration %}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, after an initial system message!") }}
    {%- endif %}
{%- endfor %}
"""

QWEN_3 = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and not message.content.startswith('<tool_response>') %}
        {%- set ns.last_query_index = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- macro turn(role, text) -%}<|im_start|>{{ role }}
{{ text }}{%- endmacro %}
{%- for message in messages %}
    {%- if message.role == "system" and loop.first %}{% continue %}{% endif %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- if '</think>' in content and loop.index0 < ns.last_query_index %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- turn('assistant', content) }}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' + tool_call.function | tojson(indent=2) + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- turn(message.role, content) + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

QWEN_3_5 = """\
{%- macro shown(content) %}{{ content if content is string else '' }}{% endmacro %}
{%- set system = shown(messages[0].content)|trim if messages[0].role == 'system' else '' %}
{%- if tools %}
    {{- '<|im_start|>system\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n<tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>' }}
    {{- '\\n</function>\\n</tool_call>' }}
    {{- ('\\n\\n' + system if system else '') + '<|im_end|>\\n' }}
{%- elif system %}
    {{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}
{%- endif %}
{%- set last = namespace(query=messages|length - 1, is_found=false) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' and not last.is_found %}
        {%- set last.is_found = true %}
        {%- set last.query = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- if not last.is_found %}{{ raise_exception('No user query found in messages.') }}{% endif %}
{%- for message in messages %}
    {%- set content = shown(message.content)|trim %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > last.query %}
            {{- '<think>\\n' + (message.reasoning_content or '')|trim + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if not loop.first else '\\n\\n' if content else '' }}
            {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for key, value in call.function.arguments|items %}
                {{- '<parameter=' + key + '>\\n' + (value if value is string else value | tojson) }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.previtem.role != 'tool' else '' }}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' else '' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- set is_off = enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\\n\\n</think>\\n\\n' if is_off else '<think>\\n' }}
{%- endif %}"""

GEMMA_4 = """\
{%- macro shown(value) -%}
    {%- if value is string -%}{{ '<|"|>' + value + '<|"|>' }}
    {%- elif value is boolean -%}{{ 'true' if value else 'false' }}
    {%- elif value is mapping -%}
        {{- '{' -}}{%- for key, one in value | dictsort -%}{{ key }}:{{ shown(one) }}{{ '' if loop.last else ',' }}
        {%- endfor -%}{{- '}' -}}
    {%- elif value is sequence -%}
        {{- '[' -}}{%- for one in value -%}{{ shown(one) }}{{ '' if loop.last else ',' }}{%- endfor -%}{{- ']' -}}
    {%- else -%}{{ value }}{%- endif -%}
{%- endmacro -%}
{%- set turn = namespace(is_open=false) -%}
{{- bos_token -}}
{%- set has_system = messages[0].role == 'system' -%}
{%- if enable_thinking or tools or has_system -%}
    {{- '<|turn>system\\n' + ('<|think|>\\n' if enable_thinking else '') -}}
    {{- (messages[0].content | trim) if has_system else '' -}}
    {%- for tool in tools or [] -%}
        {{- '<|tool>declaration:' + tool.function.name + shown(tool.function.parameters or {}) + '<tool|>' -}}
    {%- endfor -%}
    {{- '<turn|>\\n' -}}
{%- endif -%}
{%- for message in (messages[1:] if has_system else messages) -%}
    {%- set role = 'model' if message.role == 'assistant' else message.role -%}
    {%- if message.role == 'tool' -%}
        {{- '<|tool_response>response:' + message.name | default('tool') + '{value:' -}}
        {{- shown(message.content) + '}<tool_response|>' -}}
    {%- else -%}
        {{- '' if turn.is_open else '<|turn>' + role + '\\n' -}}
        {%- if message.reasoning_content and message.tool_calls -%}
            {{- '<|channel>thought\\n' + message.reasoning_content + '\\n<channel|>' -}}
        {%- endif -%}
        {%- for call in message.tool_calls or [] -%}
            {{- '<|tool_call>call:' + call.function.name + shown(call.function.arguments) + '<tool_call|>' -}}
        {%- endfor -%}
        {{- message.content or '' -}}
        {%- set turn.is_open = role == 'model' and message.tool_calls -%}
        {{- '' if turn.is_open else '<turn|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not turn.is_open -%}
    {{- '<|turn>model\\n' + ('' if enable_thinking else '<|channel>thought\\n<channel|>') -}}
{%- endif -%}"""

# Imitates how GPT-OSS writes messages, without tools: no token that ends them ends an answer.
GPT_OSS = """\
{{- '<|start|>system<|message|>You are a model.<|end|>' -}}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {{- '<|start|>developer<|message|># Instructions\\n\\n' + message.content + '<|end|>' -}}
    {%- elif message.role == 'assistant' -%}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' -}}
    {%- else -%}
        {{- '<|start|>user<|message|>' + message.content + '<|end|>' -}}
    {%- endif -%}
{%- endfor -%}"""

TEMPLATES = {
    "chatml": CHATML,
    "llama 3": LLAMA_3,
    "mistral": MISTRAL,
    "qwen 3": QWEN_3,
    "qwen 3.5": QWEN_3_5,
    "gemma 4": GEMMA_4,
}
