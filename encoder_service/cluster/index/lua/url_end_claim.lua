-- Ends a claim on an image URL, if it is that of the caller.
-- KEYS: record, mark that it is fresh, claim. ARGV: claim, when it ends (ms from now, 0: now). Returns {1}.
if get(KEYS[3]) == ARGV[1] then
  if tonumber(ARGV[2]) > 0 then
    redis.call('PEXPIRE', KEYS[3], ARGV[2])
  else
    redis.call('DEL', KEYS[3])
  end
end
return { 1 }
