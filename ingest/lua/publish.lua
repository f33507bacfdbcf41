-- Live events: SPUBLISH on a Cluster, where a message then stays at its shard's node.
local PUBLISH = 'PUBLISH'

-- Tells whoever waits for the end of a request alone that its record has it: the number of `done`.
local function publish_end(base, id, seq)
  redis.call(PUBLISH, base .. 'end:' .. id, seq)
end

-- Publishes ARGV[first...last], of which the first has number offset + 1; those up to seq are there already. Returns the
-- new seq, in digits too where it has grown; nil where the stream with those before them has gone.
local function publish(events, channel, seq, offset, first, last)
  local digits
  for i = first + seq - offset, last do
    -- Once, and as an integer: `..` writes every number as a fraction, which takes longer than the rest of the line.
    digits = string.format('%d', seq + 1)
    local id, added = digits .. '-0'
    if seq == 0 then
      added = redis.pcall('XADD', events, id, 'e', ARGV[i])
    else
      added = redis.pcall('XADD', events, 'NOMKSTREAM', id, 'e', ARGV[i])
    end
    if not added then return nil end
    if type(added) == 'table' then
      -- It is there if an earlier call broke off between here and the record, as where the user may not publish.
      local found = redis.call('XRANGE', events, id, id)[1]
      if not found or found[2][2] ~= ARGV[i] then error(added) end
    end
    seq = seq + 1
    redis.call(PUBLISH, channel, digits .. ' ' .. ARGV[i])
  end
  return seq, digits
end
